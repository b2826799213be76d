#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "../cpu/codec/signs.hpp"
#include "../cpu/select/compress.hpp"
#include "loaded.hpp"

// Shared by the CPU's and the CUDA binding of the sparse kernels: a call's objects and numbers in, checked structures
// out. Refusals are as in buffers.hpp.
namespace atoll_kernels {

inline void refuse_two_devices(std::initializer_list<const Loaded*> buffers) {
    const Loaded* const first = *buffers.begin();
    for (const Loaded* const other : buffers) {
        if (!other->given() || other->device_id == first->device_id) continue;
        throw nb::type_error(
            (other->name + " is on another device than " + first->name + "; move it there first").c_str());
    }
}

// The first of them is required.
inline void check_apart(std::initializer_list<const Loaded*> buffers) {
    refuse_two_devices(buffers);
    refuse_overlap(buffers);
}

// Check the number that a selection's rule has: a threshold, or a seed.
inline float checked_rule(double threshold) {
    const auto narrow = static_cast<float>(threshold);
    if (!(narrow >= 0) || !std::isfinite(narrow))
        refuse("threshold = " + std::to_string(threshold) +
               " is not a finite number from 0 on; start from sample_scores");
    return narrow;
}
inline std::uint64_t checked_rule(std::uint64_t seed) { return seed; }

// The arguments of every selection.
struct SelectionCall {
    Loaded gradient, residual, index, values;
    Source from;
    Chosen to;

    SelectionCall(int device_type, nb::handle gradient_object, nb::handle residual_object, double weight,
                  nb::handle index_object, nb::handle values_object)
        : gradient(required(gradient_object, "gradient", Access::read, float32_entries, device_type)),
          residual(residual_object, "residual", Access::write, float32_entries, device_type),
          index(required(index_object, "index", Access::write, index_entries, device_type)),
          values(required(values_object, "values", Access::write, float32_entries, device_type)),
          from{gradient.data, residual.data, checked_weight(weight), gradient.entries},
          to{index.as<std::uint32_t>(), values.data, index.entries} {
        check_entries(residual, gradient.entries, "it must be as long as gradient");
        check_entries(values, index.entries * block_entries, "it must hold the values of every index there is room for");
        if (block_count(from.n) > std::size_t{1} << 32)
            refuse("gradient has " + number(from.n) + " entries, more than indices of 32 bits reach; split it");
        check_apart({&gradient, &residual, &index, &values});
    }
};

inline nb::tuple as_tuple(const Selection& selection) {
    return nb::make_tuple(selection.chosen, selection.found, selection.nonfinite);
}

// The arguments of sample_scores.
struct SampleCall {
    Loaded gradient, residual, scores;
    Source from;

    SampleCall(int device_type, nb::handle gradient_object, nb::handle residual_object, double weight,
               nb::handle scores_object)
        : gradient(required(gradient_object, "gradient", Access::read, float32_entries, device_type)),
          residual(residual_object, "residual", residual_object.is_none() ? Access::write : Access::read,
                   float32_entries, device_type),
          scores(required(scores_object, "scores", Access::write, float32_entries, device_type)),
          from{gradient.data, residual.data, checked_weight(weight), gradient.entries} {
        check_entries(residual, gradient.entries, "it must be as long as gradient");
        if (scores.entries > block_count(gradient.entries)) {
            refuse("scores has room for " + number(scores.entries) + " but there are only " +
                   number(block_count(gradient.entries)) + " blocks; pass a shorter one");
        }
        check_apart({&gradient, &residual, &scores});
    }
};

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
