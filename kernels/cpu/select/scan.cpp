#include "scan.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "score.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace atoll_kernels {
namespace {

template <bool feedback>
ATOLL_INLINE Sixteen sum_at(const float* gradient, const float* residual, float weight) {
    Sixteen sum;
    load(sum.low, gradient);
    load(sum.high, gradient + 8);
    sum.low = weight * sum.low;
    sum.high = weight * sum.high;
    if constexpr (feedback) {
        Sixteen old;
        load(old.low, residual);
        load(old.high, residual + 8);
        sum.low = old.low + sum.low;
        sum.high = old.high + sum.high;
    }
    return sum;
}

template <bool feedback>
ATOLL_INLINE void fetch_ahead(const float* gradient, const float* residual, std::size_t at, std::size_t n) {
    const std::size_t there = std::min(at + ahead_entries, n - 1);
    __builtin_prefetch(gradient + there);
    if constexpr (feedback) __builtin_prefetch(residual + there, 1);
}

// Returns whether the block is finite.
template <bool feedback>
ATOLL_INLINE bool scan_block(const float* gradient, float* residual, float weight, float* score) {
    const Sixteen sum = sum_at<feedback>(gradient, residual, weight);
    const float s = total(folded(sum));
    const bool finite = s <= largest_score;
    *score = finite ? s : -1.0F;
    if constexpr (feedback) {
        if (finite) {
            store(residual, sum.low);
            store(residual + 8, sum.high);
        }
    }
    return finite;
}

template <bool feedback>
ATOLL_INLINE bool scan_tail(const float* gradient, float* residual, float weight, std::size_t n, float* score) {
    float g[block_entries] = {}, r[block_entries] = {};
    std::copy_n(gradient, n, g);
    if constexpr (feedback) std::copy_n(residual, n, r);
    const bool finite = scan_block<feedback>(g, r, weight, score);
    if constexpr (feedback) std::copy_n(r, n, residual);
    return finite;
}

template <bool feedback>
ATOLL_INLINE std::size_t scan_all(const Source& from, std::size_t first, std::size_t blocks, float* scores) {
    const float weight = from.weight;
    const float* const gradient = from.gradient + first * block_entries;
    float* const residual = feedback ? from.residual + first * block_entries : nullptr;
    const std::size_t n = std::min(blocks * block_entries, from.n - first * block_entries);
    const std::size_t whole = n / block_entries;
    std::size_t nonfinite = 0;
    const auto residual_at = [&](std::size_t block) { return feedback ? residual + block * block_entries : nullptr; };
    const auto one = [&](std::size_t block) {
        nonfinite +=
            !scan_block<feedback>(gradient + block * block_entries, residual_at(block), weight, scores + block);
    };
    std::size_t block = 0;
    for (; block + at_once <= whole; block += at_once) {
        Sixteen sums[at_once];
        for (std::size_t s = 0; s < at_once; ++s) {
            const std::size_t at = (block + s) * block_entries;
            fetch_ahead<feedback>(gradient, residual, at, n);
            sums[s] = sum_at<feedback>(gradient + at, residual_at(block + s), weight);
        }
        const Float4 four = totals(folded(sums[0]), folded(sums[1]), folded(sums[2]), folded(sums[3]));
        if (all_finite(four)) [[likely]] {
            std::memcpy(scores + block, &four, sizeof four);
            if constexpr (feedback) {
                for (std::size_t s = 0; s < at_once; ++s) {
                    store(residual_at(block + s), sums[s].low);
                    store(residual_at(block + s) + 8, sums[s].high);
                }
            }
        } else {
            for (std::size_t s = 0; s < at_once; ++s) one(block + s);
        }
    }
    for (; block < whole; ++block) one(block);
    if (whole < blocks)
        nonfinite += !scan_tail<feedback>(gradient + whole * block_entries, residual_at(whole), weight,
                                          n % block_entries, scores + whole);
    return nonfinite;
}

// Bit i: whether lane i is set.
ATOLL_INLINE std::uint64_t bits_of(const Int8& mask) {
    const Int4 low = __builtin_shufflevector(mask, mask, 0, 1, 2, 3);
    const Int4 high = __builtin_shufflevector(mask, mask, 4, 5, 6, 7);
#if defined(__SSE2__)
    const int bits = _mm_movemask_ps((__m128)low) | _mm_movemask_ps((__m128)high) << 4;
    return static_cast<std::uint64_t>(bits);
#else
    std::uint64_t bits = 0;
    for (int lane = 0; lane < 4; ++lane) {
        bits |= std::uint64_t{low[lane] != 0} << lane | std::uint64_t{high[lane] != 0} << (lane + 4);
    }
    return bits;
#endif
}

ATOLL_INLINE std::size_t mark_all(const float* scores, std::size_t blocks, float threshold, std::uint64_t* above) {
    std::size_t count = 0;
    for (std::size_t begin = 0; begin < blocks; begin += 64) {
        const std::size_t size = std::min<std::size_t>(64, blocks - begin);
        std::uint64_t word = 0;
        std::size_t i = 0;
        for (; i + 8 <= size; i += 8) {
            Float8 eight;
            load(eight, scores + begin + i);
            word |= bits_of(eight > threshold) << i;
        }
        for (; i < size; ++i) word |= std::uint64_t{scores[begin + i] > threshold} << i;
        above[begin / 64] = word;
        count += static_cast<std::size_t>(std::popcount(word));
    }
    return count;
}

ATOLL_INLINE std::size_t scan_any(const Source& from, std::size_t first, std::size_t blocks, float* scores) {
    return from.residual != nullptr ? scan_all<true>(from, first, blocks, scores)
                                    : scan_all<false>(from, first, blocks, scores);
}

}  // namespace

std::size_t scan(const Source& from, std::size_t first, std::size_t blocks, float* scores, Path path) {
    return run_on<scan_any>(path, from, first, blocks, scores);
}

std::size_t mark_above(const float* scores, std::size_t blocks, float threshold, std::uint64_t* above, Path path) {
    return run_on<mark_all>(path, scores, blocks, threshold, above);
}

void take_block(const Source& from, std::size_t block, float* values) {
    const std::size_t begin = block * block_entries;
    const std::size_t n = std::min(block_entries, from.n - begin);
    if (from.residual != nullptr) {
        std::copy_n(from.residual + begin, n, values);
        std::fill_n(from.residual + begin, n, 0.0F);
    } else {
        for (std::size_t i = 0; i < n; ++i) values[i] = from.weight * from.gradient[begin + i];
    }
    std::fill(values + n, values + block_entries, 0.0F);
}

}  // namespace atoll_kernels
