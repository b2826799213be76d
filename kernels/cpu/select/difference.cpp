#include "difference.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

#include "chunk_places.hpp"
#include "score.hpp"

namespace atoll_kernels {
namespace {

// wide [n] = live from `begin` on.
template <ValueFormat format>
ATOLL_INLINE void widen(const Difference& of, std::size_t begin, std::size_t n, float* wide) {
    if constexpr (format == ValueFormat::float32) {
        std::copy_n(static_cast<const float*>(of.live) + begin, n, wide);
    } else {
        const auto* const bits = static_cast<const std::uint16_t*>(of.live) + begin;
        // Unrolled too early, this loop would escape vectorisation.
#pragma GCC unroll 1
        for (std::size_t i = 0; i < n; ++i)
            wide[i] = format == ValueFormat::float16 ? from_float16(bits[i]) : from_bfloat16(bits[i]);
        if (of.lost == nullptr) return;
        for (std::size_t i = 0; i < n; ++i) wide[i] += of.lost[begin + i];
    }
}

template <ValueFormat format>
ATOLL_INLINE void difference_at(const Difference& of, std::size_t begin, std::size_t n, float* d) {
    widen<format>(of, begin, n, d);
    for (std::size_t i = 0; i < n; ++i) d[i] = of.scale * (of.shared_param[begin + i] - d[i]);
}

template <ValueFormat format>
ATOLL_INLINE Sixteen sixteen_at(const Difference& of, std::size_t begin) {
    Sixteen live, d;
    if constexpr (format == ValueFormat::float32) {
        const float* const at = static_cast<const float*>(of.live) + begin;
        load(live.low, at);
        load(live.high, at + 8);
    } else {
        float wide[block_entries];
        widen<format>(of, begin, block_entries, wide);
        load(live.low, wide);
        load(live.high, wide + 8);
    }
    load(d.low, of.shared_param + begin);
    load(d.high, of.shared_param + begin + 8);
    d.low = of.scale * (d.low - live.low);
    d.high = of.scale * (d.high - live.high);
    return d;
}

template <ValueFormat format>
ATOLL_INLINE void fetch_ahead(const Difference& of, std::size_t begin) {
    constexpr std::size_t bytes = format == ValueFormat::float32 ? 4 : 2;
    const std::size_t there = std::min(begin + ahead_entries, of.n - 1);
    __builtin_prefetch(of.shared_param + there);
    __builtin_prefetch(static_cast<const char*>(of.live) + there * bytes);
    if (format != ValueFormat::float32 && of.lost != nullptr) __builtin_prefetch(of.lost + there);
}

// The score, or -1 if it is not finite.
template <ValueFormat format>
ATOLL_INLINE float score_at(const Difference& of, std::size_t begin) {
    float score;
    if (begin + block_entries <= of.n) {
        score = total(folded(sixteen_at<format>(of, begin)));
    } else {
        float d[block_entries] = {};
        difference_at<format>(of, begin, of.n - begin, d);
        Sixteen padded;
        load(padded.low, d);
        load(padded.high, d + 8);
        score = total(folded(padded));
    }
    return score <= largest_score ? score : -1.0F;
}

template <ValueFormat format>
ATOLL_INLINE std::size_t scan_all(const Difference& of, std::size_t first, std::size_t blocks, float* scores) {
    const std::size_t whole = std::min(blocks, of.n / block_entries - first);
    std::size_t nonfinite = 0;
    const auto one = [&](std::size_t block) {
        scores[block] = score_at<format>(of, (first + block) * block_entries);
        nonfinite += scores[block] < 0;
    };
    std::size_t block = 0;
    for (; block + at_once <= whole; block += at_once) {
        Float4 parts[at_once];
        for (std::size_t s = 0; s < at_once; ++s) {
            const std::size_t begin = (first + block + s) * block_entries;
            fetch_ahead<format>(of, begin);
            parts[s] = folded(sixteen_at<format>(of, begin));
        }
        const Float4 four = totals(parts[0], parts[1], parts[2], parts[3]);
        if (all_finite(four)) [[likely]] {
            std::memcpy(scores + block, &four, sizeof four);
        } else {
            for (std::size_t s = 0; s < at_once; ++s) one(block + s);
        }
    }
    for (; block < blocks; ++block) one(block);
    return nonfinite;
}

ATOLL_INLINE std::size_t scan_any(const Difference& of, std::size_t first, std::size_t blocks, float* scores) {
    switch (of.format) {
        case ValueFormat::float16: return scan_all<ValueFormat::float16>(of, first, blocks, scores);
        case ValueFormat::bfloat16: return scan_all<ValueFormat::bfloat16>(of, first, blocks, scores);
        case ValueFormat::float32: break;
    }
    return scan_all<ValueFormat::float32>(of, first, blocks, scores);
}

ATOLL_INLINE void write_any(const Difference& of, std::size_t begin, std::size_t n, float* out) {
    switch (of.format) {
        case ValueFormat::float16: return difference_at<ValueFormat::float16>(of, begin, n, out);
        case ValueFormat::bfloat16: return difference_at<ValueFormat::bfloat16>(of, begin, n, out);
        case ValueFormat::float32: return difference_at<ValueFormat::float32>(of, begin, n, out);
    }
}

}  // namespace

void difference_of_block(const Difference& of, std::size_t block, float* values) {
    const std::size_t begin = block * block_entries, n = std::min(block_entries, of.n - begin);
    write_any(of, begin, n, values);
    std::fill(values + n, values + block_entries, 0.0F);
}

Selection difference_block(const Difference& of, float threshold, const Chosen& to, int threads, Path path) {
    return blocks_above(
        block_count(of.n), threshold, to, threads, path,
        [&](std::size_t first, std::size_t count, float* scores) {
            return run_on<scan_any>(path, of, first, count, scores);
        },
        [&](std::size_t block, float* values) { difference_of_block(of, block, values); });
}

void difference_scores(const Difference& of, std::uint64_t seed, std::size_t count, float* scores) {
    const auto index = std::make_unique<std::uint32_t[]>(count);
    random_blocks(seed, block_count(of.n), count, index.get());
    for (std::size_t k = 0; k < count; ++k) scan_any(of, index[k], 1, scores + k);
}

void difference(const Difference& of, float* out, Path path) {
    run_on<write_any>(path, of, std::size_t{0}, of.n, out);
}

}  // namespace atoll_kernels
