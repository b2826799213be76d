#pragma once

#include <cstddef>
#include <cstdint>

#include "../codec/half.hpp"
#include "compress.hpp"

// Chooses the part of the difference between two copies of a tensor that is worth sending. Nothing is written but the
// choice: what is not sent stays in the difference.
//
// d = scale * (shared_param - live), each operation rounded to float32; live of 16 bits may come with what rounding to
// them took away, and live + lost stands for it. Blocks, scores and non-finite blocks as in compress.hpp. The same bits
// on every processor and for any number of threads. Bound by memory: reads 8n bytes (of 16 bits: 6n, with lost 10n).
namespace atoll_kernels {

struct Difference {
    const float* shared_param;  // float32 [n]
    const void* live;     // [n]
    ValueFormat format;   // of live
    float scale;
    std::size_t n;
    const float* lost = nullptr;  // float32 [n], with live of 16 bits only
};

// Blocks whose score exceeds `threshold` >= 0, the first `capacity` of them.
Selection difference_block(const Difference& of, float threshold, const Chosen& to, int threads, Path path);

// scores[k] = score of the k-th of random_blocks(seed, blocks, count), or -1 if that is not finite.
void difference_scores(const Difference& of, std::uint64_t seed, std::size_t count, float* scores);

// values [16] = d of one block, zeros beyond the tensor's end.
void difference_of_block(const Difference& of, std::size_t block, float* values);

// out [n] = d.
void difference(const Difference& of, float* out, Path path);

}  // namespace atoll_kernels
