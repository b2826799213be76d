#include "difference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

namespace atoll_kernels {
namespace {

constexpr float largest = std::numeric_limits<float>::max();
constexpr std::size_t ahead_entries = 1024;  // a page: the processor's own prefetcher stops at its end

template <ValueFormat format>
ATOLL_INLINE float live_at(const void* live, std::size_t i) {
    if constexpr (format == ValueFormat::float32) return static_cast<const float*>(live)[i];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(live)[i];
    return format == ValueFormat::float16 ? from_float16(bits) : from_bfloat16(bits);
}

template <ValueFormat format>
ATOLL_INLINE void difference_at(const Difference& of, std::size_t begin, std::size_t n, float* d) {
    for (std::size_t i = 0; i < n; ++i)
        d[i] = of.scale * (of.master[begin + i] - live_at<format>(of.live, begin + i));
}

ATOLL_INLINE float score_of(const float* d) {
    float lanes[8];
    for (std::size_t i = 0; i < 8; ++i) lanes[i] = std::fabs(d[i]) + std::fabs(d[i + 8]);
    float four[4];
    for (std::size_t i = 0; i < 4; ++i) four[i] = lanes[i] + lanes[i + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

template <ValueFormat format>
ATOLL_INLINE Selection choose(const Difference& of, float threshold, const Chosen& to) {
    Selection selection{0, 0, 0};
    const std::size_t blocks = block_count(of.n);
    for (std::size_t block = 0; block < blocks; ++block) {
        const std::size_t begin = block * block_entries;
        alignas(32) float d[block_entries];
        if (begin + block_entries <= of.n) {
            __builtin_prefetch(of.master + begin + ahead_entries);
            __builtin_prefetch(static_cast<const char*>(of.live) +
                               (begin + ahead_entries) * (format == ValueFormat::float32 ? 4 : 2));
            difference_at<format>(of, begin, block_entries, d);
        } else {
            std::fill_n(d, block_entries, 0.0F);
            difference_at<format>(of, begin, of.n - begin, d);
        }
        const float score = score_of(d);
        if (!(score <= largest)) {
            ++selection.nonfinite;
        } else if (score > threshold) {
            ++selection.found;
            if (selection.kept == to.capacity) continue;
            to.index[selection.kept] = static_cast<std::uint32_t>(block);
            std::copy_n(d, block_entries, to.values + block_entries * selection.kept++);
        }
    }
    return selection;
}

ATOLL_INLINE Selection choose_any(const Difference& of, float threshold, const Chosen& to) {
    switch (of.format) {
        case ValueFormat::float16: return choose<ValueFormat::float16>(of, threshold, to);
        case ValueFormat::bfloat16: return choose<ValueFormat::bfloat16>(of, threshold, to);
        case ValueFormat::float32: break;
    }
    return choose<ValueFormat::float32>(of, threshold, to);
}

ATOLL_INLINE void write_any(const Difference& of, std::size_t begin, std::size_t n, float* out) {
    switch (of.format) {
        case ValueFormat::float16: return difference_at<ValueFormat::float16>(of, begin, n, out);
        case ValueFormat::bfloat16: return difference_at<ValueFormat::bfloat16>(of, begin, n, out);
        case ValueFormat::float32: return difference_at<ValueFormat::float32>(of, begin, n, out);
    }
}

Selection choose_portable(const Difference& of, float threshold, const Chosen& to) {
    return choose_any(of, threshold, to);
}
ATOLL_TARGET_AVX2 Selection choose_avx2(const Difference& of, float threshold, const Chosen& to) {
    return choose_any(of, threshold, to);
}
void write_portable(const Difference& of, float* out) { write_any(of, 0, of.n, out); }
ATOLL_TARGET_AVX2 void write_avx2(const Difference& of, float* out) { write_any(of, 0, of.n, out); }

}  // namespace

Selection difference_block(const Difference& of, float threshold, const Chosen& to, Path path) {
    return (path == Path::avx2 ? choose_avx2 : choose_portable)(of, threshold, to);
}

void difference_scores(const Difference& of, std::uint64_t seed, std::size_t count, float* scores) {
    const auto index = std::make_unique<std::uint32_t[]>(count);
    random_blocks(seed, block_count(of.n), count, index.get());
    for (std::size_t k = 0; k < count; ++k) {
        const std::size_t begin = index[k] * block_entries;
        float d[block_entries] = {};
        write_any(of, begin, std::min(block_entries, of.n - begin), d);
        const float score = score_of(d);
        scores[k] = score <= largest ? score : -1.0F;
    }
}

void difference(const Difference& of, float* out, Path path) {
    (path == Path::avx2 ? write_avx2 : write_portable)(of, out);
}

}  // namespace atoll_kernels
