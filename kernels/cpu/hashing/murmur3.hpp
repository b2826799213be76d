#pragma once

#include <cstdint>

#include "../processor/features.hpp"

// MurmurHash3_x86_32 (Appleby, 2011, public domain) of a key of four bytes, little-endian, for the processor and the
// device alike.
namespace atoll_kernels {

ATOLL_INLINE std::uint32_t rotated_left(std::uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

ATOLL_INLINE std::uint32_t murmur3(std::uint32_t key, std::uint32_t seed) {
    std::uint32_t k = key * 0xcc9e2d51u;
    k = rotated_left(k, 15) * 0x1b873593u;
    std::uint32_t h = rotated_left(seed ^ k, 13) * 5 + 0xe6546b64u;
    h ^= 4;  // the key's length
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}

// A hash of [0, 2^32) brought into [0, buckets), by the upper bits of the product: no division, no bias towards low
// buckets (Lemire, 2016).
ATOLL_INLINE std::uint64_t bucket_of(std::uint32_t hashed, std::uint64_t buckets) {
    return (std::uint64_t{hashed} * buckets) >> 32;
}

// h0: the partition of a unit, the same on every rank.
ATOLL_INLINE std::uint32_t partition_of(std::uint32_t unit, std::uint32_t seed, std::uint32_t partitions) {
    return static_cast<std::uint32_t>(bucket_of(murmur3(unit, seed), partitions));
}

}  // namespace atoll_kernels
