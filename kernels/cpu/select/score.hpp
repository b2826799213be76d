#pragma once

#include <cstddef>
#include <cstring>
#include <limits>

#include "../processor/features.hpp"

// The score of a block, the sum of its 16 magnitudes, in vectors: the same additions in the same order everywhere.
namespace atoll_kernels {

typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef int Int4 __attribute__((vector_size(16)));
typedef int Int8 __attribute__((vector_size(32)));

constexpr float largest_score = std::numeric_limits<float>::max();  // beyond it a block is not finite

// Blocks whose scores are summed side by side.
constexpr std::size_t at_once = 4;

// The distance ahead of its use at which memory is asked for. Two arrays are read, and left to itself the processor
// keeps too few cache lines in flight to use all the bandwidth one core can have: docs/performance.md.
constexpr std::size_t ahead_entries = 1024;

ATOLL_INLINE void load(Float8& value, const float* at) { std::memcpy(&value, at, sizeof value); }
ATOLL_INLINE void store(float* at, const Float8& value) { std::memcpy(at, &value, sizeof value); }
ATOLL_INLINE Float8 magnitude(const Float8& x) { return (Float8)((Int8)x & 0x7fffffff); }

struct Sixteen {
    Float8 low, high;
};

ATOLL_INLINE Float4 folded(const Sixteen& x) {
    const Float8 sum = magnitude(x.low) + magnitude(x.high);
    return __builtin_shufflevector(sum, sum, 0, 1, 2, 3) + __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
}

ATOLL_INLINE float total(const Float4& x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// total() of four at once: the same additions in the same order.
ATOLL_INLINE Float4 totals(const Float4& a, const Float4& b, const Float4& c, const Float4& d) {
    const Float4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Float4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// True if none of four scores is beyond the largest.
ATOLL_INLINE bool all_finite(const Float4& scores) {
    typedef long long Long2 __attribute__((vector_size(16)));
    const Long2 finite = (Long2)(scores <= largest_score);
    return (finite[0] & finite[1]) == -1;
}

}  // namespace atoll_kernels
