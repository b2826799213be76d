#pragma once

#include <cstddef>
#include <cstdint>

#include "../processor/features.hpp"

// The blocks that random_blocks(seed, blocks, count) names, for the processor and the device alike.
namespace atoll_kernels {

// splitmix64 (Steele, Lea, Flood, 2014): the k-th number of the sequence that begins at `seed`.
ATOLL_INLINE std::uint64_t hash(std::uint64_t seed, std::uint64_t k) {
    std::uint64_t x = seed + (k + 1) * 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

ATOLL_INLINE std::size_t interval_begin(std::size_t k, std::size_t blocks, std::size_t count) {
    return static_cast<std::size_t>(static_cast<unsigned __int128>(k) * blocks / count);
}

// The k-th of `count` <= blocks different blocks, one out of each of as many equal intervals.
ATOLL_INLINE std::uint32_t random_block_of_interval(std::uint64_t seed, std::size_t k, std::size_t blocks,
                                                    std::size_t count) {
    const std::size_t begin = interval_begin(k, blocks, count);
    const std::size_t size = interval_begin(k + 1, blocks, count) - begin;
    const auto within = static_cast<unsigned __int128>(hash(seed, k)) * size >> 64;
    return static_cast<std::uint32_t>(begin + static_cast<std::size_t>(within));
}

}  // namespace atoll_kernels
