#pragma once

#include "../cpu/codec/signs.hpp"
#include "sparse_calls.hpp"

namespace atoll_kernels {

// The arguments of sign_encode (values are written) and sign_add (they are added to).
struct SignCall {
    Loaded values, bits, scales;
    SignCode code;

    SignCall(int device_type, nb::handle values_object, nb::handle bits_object, nb::handle scales_object,
             bool two_sided, Access access)
        : values(required(values_object, "values", Access::write, float32_entries, device_type)),
          bits(required(bits_object, "bits", access, byte_entries, device_type)),
          scales(required(scales_object, "scales", access, float32_entries, device_type)),
          code{bits.as<std::uint8_t>(), scales.data, two_sided} {
        check_entries(bits, sign_bytes(values.entries), "it must hold a bit for each value");
        check_entries(scales, sign_blocks(values.entries) * (two_sided ? 2 : 1),
                      "it must hold one scale, or two, for each block of 1024 values");
        check_apart({&values, &bits, &scales});
    }
};

}  // namespace atoll_kernels
