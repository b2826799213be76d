#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "../processor/features.hpp"

// float32 to and from the two 16-bit formats, to the nearest and of two equally near to the even one: the bits of
// torch's casts on every processor. Written without branches, so that a loop over them is vectorised.
namespace atoll_kernels {

enum class ValueFormat { float32, float16, bfloat16 };

constexpr float largest_float16 = 65504.0F;
constexpr float largest_bfloat16 = 0x1.fep127F;

ATOLL_INLINE std::uint16_t to_bfloat16(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<std::uint16_t>(nan ? 0x7fc0 : rounded);
}

ATOLL_INLINE float from_bfloat16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

ATOLL_INLINE std::uint16_t to_float16(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = bits >> 16 & 0x8000;
    const std::uint32_t size = bits & 0x7fffffff;
    const std::uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    // Adding 0.5 leaves the bits of a subnormal float16, rounded by the addition, in the lowest places.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(size) + 0.5F) - 0x3f000000;
    const std::uint32_t finite = size < 0x38800000 ? small : std::min(normal, std::uint32_t{0x7c00});
    const std::uint32_t half = size > 0x7f800000 ? 0x7e00 : (size >= 0x47800000 ? 0x7c00 : finite);
    return static_cast<std::uint16_t>(sign | half);
}

ATOLL_INLINE float from_float16(std::uint16_t x) {
    const std::uint32_t sign = (std::uint32_t{x} & 0x8000) << 16;
    const std::uint32_t shifted = (std::uint32_t{x} & 0x7fff) << 13;
    const std::uint32_t normal = shifted + 0x38000000;
    const std::uint32_t special = shifted | 0x7f800000;
    // A subnormal is a multiple of 2^-24.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(static_cast<float>(shifted >> 13) * 0x1p-24F);
    const std::uint32_t size = shifted >= 0x0f800000 ? special : (shifted < 0x00800000 ? small : normal);
    return std::bit_cast<float>(sign | size);
}

}  // namespace atoll_kernels
