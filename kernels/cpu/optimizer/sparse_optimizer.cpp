#include "sparse_optimizer.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "../processor/thread_pool.hpp"
#include "hyperparameters.hpp"

namespace atoll_kernels {
namespace {

constexpr std::size_t blocks_per_chunk = 2048;
constexpr std::size_t ahead = 32;  // blocks lie apart, so the processor's own prefetching does not find them

// One block in local memory.
struct Block {
    alignas(32) float p[block_entries], g[block_entries], m[block_entries], v[block_entries];
};

ATOLL_INLINE bool finite(const float* values) {
    std::uint32_t bad = 0;
    for (std::size_t i = 0; i < block_entries; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        bad |= static_cast<std::uint32_t>((bits & 0x7f800000) == 0x7f800000);
    }
    return bad == 0;
}

template <Rule rule, bool moments>
ATOLL_INLINE void step_block(Block& b, const Constants& c) {
    for (std::size_t i = 0; i < block_entries; ++i) {
        if constexpr (rule == Rule::adamw) {
            b.p[i] *= c.shrink;
        } else {
            b.g[i] = b.g[i] + c.decay * b.p[i];
        }
    }
    if constexpr (rule == Rule::adam || rule == Rule::adamw) {
        for (std::size_t i = 0; i < block_entries; ++i) {
            b.m[i] = b.m[i] + c.one_minus_beta1 * (b.g[i] - b.m[i]);
            b.v[i] = c.beta2 * b.v[i] + c.one_minus_beta2 * b.g[i] * b.g[i];
            b.p[i] = b.p[i] - c.step_size * (b.m[i] / (std::sqrt(b.v[i]) / c.root2 + c.epsilon));
        }
    } else if constexpr (!moments) {
        for (std::size_t i = 0; i < block_entries; ++i) b.p[i] = b.p[i] - c.lr * b.g[i];
    } else {
        for (std::size_t i = 0; i < block_entries; ++i) {
            b.m[i] = c.momentum * b.m[i] + b.g[i];
            const float direction = rule == Rule::nesterov ? b.g[i] + c.momentum * b.m[i] : b.m[i];
            b.p[i] = b.p[i] - c.lr * direction;
        }
    }
}

ATOLL_INLINE void write_live(const Live& live, std::size_t begin, const float* p, std::size_t n) {
    if (live.data == nullptr) return;
    if (live.format == ValueFormat::float32) {
        std::copy_n(p, n, static_cast<float*>(live.data) + begin);
        return;
    }
    std::uint16_t narrow[block_entries];
    // Unrolled too early, these loops would escape vectorisation.
    if (live.format == ValueFormat::float16) {
#pragma GCC unroll 1
        for (std::size_t i = 0; i < block_entries; ++i) narrow[i] = to_float16(p[i]);
    } else {
#pragma GCC unroll 1
        for (std::size_t i = 0; i < block_entries; ++i) narrow[i] = to_bfloat16(p[i]);
    }
    std::copy_n(narrow, n, static_cast<std::uint16_t*>(live.data) + begin);
}

void decay_missed(const Parameters& to, std::uint32_t block, const Hyperparameters& hyper, Block& b) {
    const std::int64_t missed = std::int64_t{hyper.step} - to.last_step[block] - 1;
    to.last_step[block] = hyper.step;
    if (missed <= 0) return;
    const auto first = static_cast<float>(power(hyper.momentum_or_beta1, static_cast<std::uint32_t>(missed)));
    for (float& m : b.m) m *= first;
    if (to.second == nullptr) return;
    const auto second = static_cast<float>(power(hyper.beta2, static_cast<std::uint32_t>(missed)));
    for (float& v : b.v) v *= second;
}

template <Rule rule, bool moments>
ATOLL_INLINE void touch(const Parameters& to, std::uint32_t block, const float* values, const Hyperparameters& hyper,
                        const Constants& c) {
    constexpr bool adaptive = rule == Rule::adam || rule == Rule::adamw;
    const std::size_t begin = block * block_entries;
    Block b;
    const auto run = [&](std::size_t n) __attribute__((always_inline)) {
        std::copy_n(to.shared_param + begin, n, b.p);
        if constexpr (moments) std::copy_n(to.first + begin, n, b.m);
        if constexpr (adaptive) std::copy_n(to.second + begin, n, b.v);
        for (std::size_t i = 0; i < block_entries; ++i) b.g[i] = c.scale * values[i];
        if (to.last_step != nullptr) decay_missed(to, block, hyper, b);
        step_block<rule, moments>(b, c);
        std::copy_n(b.p, n, to.shared_param + begin);
        if constexpr (moments) std::copy_n(b.m, n, to.first + begin);
        if constexpr (adaptive) std::copy_n(b.v, n, to.second + begin);
        write_live(to.live, begin, b.p, n);
    };
    if (to.n - begin >= block_entries) {
        run(block_entries);
    } else {
        std::memset(&b, 0, sizeof b);
        run(to.n - begin);
    }
}

ATOLL_INLINE void fetch(const Parameters& to, std::uint32_t block) {
    const std::size_t begin = block * block_entries;
    __builtin_prefetch(to.shared_param + begin, 1);
    if (to.first != nullptr) __builtin_prefetch(to.first + begin, 1);
    if (to.second != nullptr) __builtin_prefetch(to.second + begin, 1);
    if (to.last_step != nullptr) __builtin_prefetch(to.last_step + block, 1);
    if (to.live.data != nullptr) {
        const std::size_t bytes = to.live.format == ValueFormat::float32 ? 4 : 2;
        __builtin_prefetch(static_cast<char*>(to.live.data) + begin * bytes, 1);
    }
}

template <Rule rule, bool moments>
ATOLL_INLINE std::size_t touch_all(const Parameters& to, const Units& update, std::size_t begin, std::size_t end,
                                   const Hyperparameters& hyper, const Constants& c) {
    std::size_t left_out = 0;
    for (std::size_t k = begin; k < std::min(end, begin + ahead); ++k) fetch(to, update.index[k]);
    for (std::size_t k = begin; k < end; ++k) {
        if (k + ahead < end) fetch(to, update.index[k + ahead]);
        const float* const values = update.values + k * block_entries;
        if (finite(values)) [[likely]] {
            touch<rule, moments>(to, update.index[k], values, hyper, c);
        } else {
            ++left_out;
        }
    }
    return left_out;
}

ATOLL_INLINE std::size_t touch_chunk(const Parameters& to, const Units& update, std::size_t begin, std::size_t end,
                                     const Hyperparameters& hyper, const Constants& c) {
    switch (hyper.rule) {
        case Rule::adam: return touch_all<Rule::adam, true>(to, update, begin, end, hyper, c);
        case Rule::adamw: return touch_all<Rule::adamw, true>(to, update, begin, end, hyper, c);
        case Rule::nesterov: return touch_all<Rule::nesterov, true>(to, update, begin, end, hyper, c);
        case Rule::sgd: break;
    }
    return to.first != nullptr ? touch_all<Rule::sgd, true>(to, update, begin, end, hyper, c)
                               : touch_all<Rule::sgd, false>(to, update, begin, end, hyper, c);
}

}  // namespace

std::size_t apply_update(const Parameters& parameters, const Units& update, const Hyperparameters& hyper, int threads,
                         Path path) {
    const Constants constants = prepare(hyper);
    std::atomic<std::size_t> left_out{0};
    auto work = [&](std::size_t chunk) {
        const std::size_t begin = chunk * blocks_per_chunk;
        const std::size_t end = std::min(update.count, begin + blocks_per_chunk);
        left_out.fetch_add(run_on<touch_chunk>(path, parameters, update, begin, end, hyper, constants),
                           std::memory_order_relaxed);
    };
    for_each_chunk((update.count + blocks_per_chunk - 1) / blocks_per_chunk, threads, work);
    return left_out.load();
}

}  // namespace atoll_kernels
