#pragma once

#include <cstddef>
#include <cstdint>

#include "../processor/features.hpp"

// Chooses the part of a gradient that is worth sending, fused with error feedback.
//
// Rules of all selections. v = residual + weight * gradient (with error feedback) or weight * gradient (without),
// each product and each sum rounded to float32. Chosen entries are copied out and become 0 in the residual; all others
// stay there, so emitted + residual is v, entry by entry and exactly. A block is 16 entries, one cache line, counted
// from the tensor's start; the last one may be shorter and is emitted padded with zeros. Its score is the sum of its
// magnitudes, added in an order that is the same everywhere.
//
// A block whose score is no finite number (a NaN, an infinity, or magnitudes whose sum exceeds float32) is never
// chosen: its old residual stays as it was, this step's gradient of it is dropped, and it is counted.
//
// Results have the same bits for every number of threads and on every processor. Indices ascend. n = 0 is allowed, and
// any alignment. Source: StellaTrain (SIGCOMM '24), section 3.2; error feedback: Stich et al., 2018.
namespace atoll_kernels {

constexpr std::size_t block_entries = 16;

inline std::size_t block_count(std::size_t entries) { return (entries + block_entries - 1) / block_entries; }

struct Source {
    const float* gradient;  // float32 [n]
    float* residual;        // float32 [n], updated; null: no error feedback, and nothing is written
    float weight;
    std::size_t n;
};

// Room for `capacity` chosen blocks.
struct Chosen {
    std::uint32_t* index;
    float* values;  // [capacity, 16]
    std::size_t capacity;
};

struct Selection {
    std::size_t chosen;     // blocks written to the output
    std::size_t found;      // blocks that qualified; those beyond the capacity stay in the residual
    std::size_t nonfinite;  // blocks left out because they hold a value that is not finite
};

// Blocks whose score exceeds `threshold` >= 0, the first `capacity` of them.
// Bound by memory: reads 8n, writes 4n bytes with error feedback; reads 4n without.
Selection threshold_block(const Source& from, float threshold, const Chosen& to, int threads, Path path);

// The `capacity` blocks of the highest score; of equals the first. Blocks of zeros are never chosen.
Selection topk_block(const Source& from, const Chosen& to, int threads, Path path);

// `count` <= blocks different blocks, ascending: one out of each of `count` equal intervals, by a hash of seed and
// interval. Every sender and receiver with the same seed has the same, so the indices need not travel.
void random_blocks(std::uint64_t seed, std::size_t blocks, std::size_t count, std::uint32_t* index);

// The blocks of random_blocks(seed, blocks, capacity). As the receiver expects them all, a block that is not finite is
// emitted as zeros (and stays in the residual as above).
Selection random_block(const Source& from, std::uint64_t seed, const Chosen& to, int threads, Path path);

// scores[k] = score of the k-th of random_blocks(seed, blocks, count), or -1 if that is not finite. No other writes.
void sample_scores(const Source& from, std::uint64_t seed, std::size_t count, float* scores);

}  // namespace atoll_kernels
