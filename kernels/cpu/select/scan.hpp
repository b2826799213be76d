#pragma once

#include <cstdint>

#include "compress.hpp"

// The one pass over memory that every selection makes: add the gradient to the residual and look at the sum.
namespace atoll_kernels {

// One unit of work. A multiple of 64 blocks; what a chunk reads still lies in a cache when its chosen blocks are
// copied.
constexpr std::size_t scan_entries = std::size_t{1} << 18;
constexpr std::size_t scan_blocks = scan_entries / block_entries;

inline std::size_t scan_count(std::size_t entries) { return (entries + scan_entries - 1) / scan_entries; }

// Blocks [first, first + blocks): updates the residual, writes scores[0..blocks), -1 for a block that is not finite.
// Returns how many are not.
std::size_t scan(const Source& from, std::size_t first, std::size_t blocks, float* scores, Path path);

// Bit i % 64 of above[i / 64] tells whether scores[i] > threshold; returns how many do.
std::size_t mark_above(const float* scores, std::size_t blocks, float threshold, std::uint64_t* above, Path path);

// Copies the values of one block after the scan, padded with zeros. The residual's entries become 0: what is sent leaves
// it.
void take_block(const Source& from, std::size_t block, float* values);

}  // namespace atoll_kernels
