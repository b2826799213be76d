#pragma once

#include <cstddef>
#include <cstdint>

#include "../processor/features.hpp"

// Gradients as signs: a bit for each entry, and for each block of `sign_block` neighbouring entries (the last may be
// shorter) the mean magnitude, or one mean for each sign.
//
// With one mean a block decodes to the nearest multiple of its signs (EF-signSGD, Karimireddy et al., 2019, blockwise
// as Zheng et al., 2019); with two to the nearest pair of values (1-bit SGD, Seide et al., 2014). What is not sent is
// left where the values were: decoded + left is what came in, to a rounding.
namespace atoll_kernels {

constexpr std::size_t sign_block = 1024;

inline std::size_t sign_blocks(std::size_t entries) { return (entries + sign_block - 1) / sign_block; }
inline std::size_t sign_bytes(std::size_t entries) { return (entries + 7) / 8; }

struct SignCode {
    std::uint8_t* bits;  // [sign_bytes(n)]; bit i % 8 of byte i / 8 is set where entry i is below zero
    float* scales;       // [sign_blocks(n)], or [sign_blocks(n), 2]: of what is not below zero, of what is
    bool two_sided;
};

// values: float32 [n], finite; in place what is left. Means are summed in float64 by 32 lanes and then in pairs: the
// same bits for every number of threads and on every device.
// Bound by memory: reads 8n, writes 4n + n / 8 bytes. Twin: sign_encode_cuda.
void sign_encode(float* values, std::size_t n, const SignCode& code, int threads, Path path);

// out[i] += what bit i stands for. Bound by memory: reads 4n + n / 8, writes 4n bytes. Twin: sign_add_cuda.
void sign_add(const SignCode& code, float* out, std::size_t n, int threads, Path path);

}  // namespace atoll_kernels
