#include "weighted_sum.hpp"

#include <algorithm>
#include <cstring>

#include "../processor/thread_pool.hpp"

namespace atoll_kernels {
namespace {

// Many inputs are summed in a block that stays in the first-level cache; it also makes `out` among the later inputs
// safe.
constexpr std::size_t block_entries = 1024;

constexpr std::size_t width = 8;
typedef float Float8 __attribute__((vector_size(32)));

ATOLL_INLINE void load(Float8& value, const float* at) { std::memcpy(&value, at, sizeof value); }
ATOLL_INLINE void store(float* at, const Float8& value) { std::memcpy(at, &value, sizeof value); }

ATOLL_INLINE void scale(float* out, std::size_t n, WeightedInput a) {
    std::size_t i = 0;
    for (; i + width <= n; i += width) {
        Float8 x;
        load(x, a.x + i);
        store(out + i, a.weight * x);
    }
    for (; i < n; ++i) out[i] = a.weight * a.x[i];
}

ATOLL_INLINE void scale_two(float* out, std::size_t n, WeightedInput a, WeightedInput b) {
    std::size_t i = 0;
    for (; i + width <= n; i += width) {
        Float8 x, y;
        load(x, a.x + i);
        load(y, b.x + i);
        store(out + i, a.weight * x + b.weight * y);
    }
    for (; i < n; ++i) out[i] = a.weight * a.x[i] + b.weight * b.x[i];
}

ATOLL_INLINE void add_scaled(float* sum, std::size_t n, WeightedInput a) {
    std::size_t i = 0;
    for (; i + width <= n; i += width) {
        Float8 x, y;
        load(x, sum + i);
        load(y, a.x + i);
        store(sum + i, x + a.weight * y);
    }
    for (; i < n; ++i) sum[i] += a.weight * a.x[i];
}

ATOLL_INLINE void sum_chunk(float* out, std::size_t begin, std::size_t n, const WeightedInput* inputs,
                            std::size_t count) {
    const auto at = [&](std::size_t input, std::size_t offset) {
        return WeightedInput{inputs[input].x + begin + offset, inputs[input].weight};
    };
    if (count == 0) {
        std::fill_n(out + begin, n, 0.0F);
        return;
    }
    if (count == 1) return scale(out + begin, n, at(0, 0));
    if (count == 2) return scale_two(out + begin, n, at(0, 0), at(1, 0));
    float block[block_entries];
    for (std::size_t offset = 0; offset < n; offset += block_entries) {
        const std::size_t size = std::min(block_entries, n - offset);
        scale_two(block, size, at(0, offset), at(1, offset));
        for (std::size_t input = 2; input + 1 < count; ++input) add_scaled(block, size, at(input, offset));
        scale_two(out + begin + offset, size, WeightedInput{block, 1.0F}, at(count - 1, offset));
    }
}

void sum_chunk_portable(float* out, std::size_t begin, std::size_t n, const WeightedInput* inputs, std::size_t count) {
    sum_chunk(out, begin, n, inputs, count);
}

ATOLL_TARGET_AVX2 void sum_chunk_avx2(float* out, std::size_t begin, std::size_t n, const WeightedInput* inputs,
                                      std::size_t count) {
    sum_chunk(out, begin, n, inputs, count);
}

}  // namespace

void weighted_sum(float* out, std::size_t n, const WeightedInput* inputs, std::size_t count, int threads, Path path) {
    const auto chunk_sum = path == Path::avx2 ? sum_chunk_avx2 : sum_chunk_portable;
    auto work = [&](std::size_t chunk) {
        const std::size_t begin = chunk * chunk_entries;
        chunk_sum(out, begin, std::min(chunk_entries, n - begin), inputs, count);
    };
    for_each_chunk(chunk_count(n), threads, work);
}

}  // namespace atoll_kernels
