#include "weights.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "../../cpu/codec/half.hpp"
#include "../../cpu/processor/features.hpp"

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

namespace atoll_kernels {
namespace {

constexpr std::size_t batch_blocks =
    64;  // fetched ahead: changed blocks lie apart, and the processor does not find them

template <std::uint16_t narrow(float)>
void copy_narrow(const float* from, std::size_t n, std::uint16_t* to) {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < n; ++i) to[i] = narrow(from[i]);
}

void copy_block(const float* shared_param, std::size_t begin, std::size_t n, const Live& live) {
    switch (live.format) {
        case ValueFormat::float32: std::copy_n(shared_param + begin, n, static_cast<float*>(live.data) + begin); break;
        case ValueFormat::float16:
            copy_narrow<to_float16>(shared_param + begin, n, static_cast<std::uint16_t*>(live.data) + begin);
            break;
        case ValueFormat::bfloat16:
            copy_narrow<to_bfloat16>(shared_param + begin, n, static_cast<std::uint16_t*>(live.data) + begin);
            break;
    }
}

constexpr std::size_t lanes = block_entries * sizeof(float) / sizeof(std::uint64_t);
constexpr std::uint64_t odd = 0x9e3779b97f4a7c15ULL;

struct Lanes {
    std::uint64_t state[lanes];

    // Each lane's step is a bijection of its state for any word: a difference never disappears again.
    void take(const float* block) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            std::uint64_t word;
            std::memcpy(&word, block + 2 * lane, sizeof word);
            state[lane] = std::rotl(state[lane] ^ word, 29) * odd;
        }
    }
};

std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

}  // namespace

Weights::Weights(const Parameters& parameters)
    : parameters_(parameters), live_(parameters.live), changed_((block_count(parameters.n) + 63) / 64) {
    parameters_.live.data = nullptr;
}

void Weights::update(const Units& total, const Hyperparameters& hyper) {
    apply_update(parameters_, total, hyper, 1, best_path());
    mark_changed(total);
}

void Weights::mark_changed(const Units& blocks) {
    for (std::size_t k = 0; k < blocks.count; ++k)
        changed_[blocks.index[k] / 64] |= std::uint64_t{1} << (blocks.index[k] % 64);
}

void Weights::forget_changes() { std::fill(changed_.begin(), changed_.end(), 0); }

template <typename Visit>
void Weights::visit_changed(const Visit& visit) {
    std::size_t batch[batch_blocks];
    std::size_t count = 0;
    const auto visit_batch = [&] {
        for (std::size_t k = 0; k < count; ++k) {
            const std::size_t begin = batch[k] * block_entries;
            visit(batch[k], begin, std::min(block_entries, parameters_.n - begin));
        }
        count = 0;
    };
    for (std::size_t word = 0; word < changed_.size(); ++word) {
        for (std::uint64_t bits = std::exchange(changed_[word], 0); bits != 0; bits &= bits - 1) {
            const std::size_t block = 64 * word + static_cast<std::size_t>(std::countr_zero(bits));
            __builtin_prefetch(parameters_.shared_param + block * block_entries);
            batch[count++] = block;
            if (count == batch_blocks) visit_batch();
        }
    }
    visit_batch();
}

void Weights::publish() {
    visit_changed([this](std::size_t, std::size_t begin, std::size_t n) {
        copy_block(parameters_.shared_param, begin, n, live_);
    });
}

template <typename Visit>
void Weights::visit_blocks(const Units& update, const Visit& visit) const {
    constexpr std::size_t ahead = 16;
    for (std::size_t k = 0; k < update.count; ++k) {
        if (k + ahead < update.count)
            __builtin_prefetch(parameters_.shared_param + update.index[k + ahead] * block_entries, 1);
        const std::size_t begin = update.index[k] * block_entries;
        visit(k * block_entries, begin, std::min(block_entries, parameters_.n - begin));
    }
}

void Weights::shift(const Units& update, float factor, float* saved) {
    float* const shared_param = parameters_.shared_param;
    visit_blocks(update, [&](std::size_t at, std::size_t begin, std::size_t n) {
        std::copy_n(shared_param + begin, n, saved + at);
        for (std::size_t i = 0; i < n; ++i) shared_param[begin + i] += factor * update.values[at + i];
    });
}

void Weights::put_back(const Units& update, const float* saved) {
    visit_blocks(update, [&](std::size_t at, std::size_t begin, std::size_t n) {
        std::copy_n(saved + at, n, parameters_.shared_param + begin);
    });
}

std::size_t Weights::changed_blocks() const {
    std::size_t count = 0;
    for (const std::uint64_t word : changed_) count += static_cast<std::size_t>(std::popcount(word));
    return count;
}

void Weights::take_changes(std::uint32_t* index, float* values) {
    visit_changed([&](std::size_t block, std::size_t begin, std::size_t n) {
        *index++ = static_cast<std::uint32_t>(block);
        std::copy_n(parameters_.shared_param + begin, n, values);
        std::fill(values + n, values + block_entries, 0.0F);
        values += block_entries;
    });
}

std::uint64_t Weights::digest() const {
    const float* const x = parameters_.shared_param;
    const std::size_t n = parameters_.n;
    Lanes all;
    for (std::size_t lane = 0; lane < lanes; ++lane) all.state[lane] = (lane + 1) * odd;
    const std::size_t whole = n / block_entries * block_entries;
    for (std::size_t begin = 0; begin < whole; begin += block_entries) all.take(x + begin);
    if (whole < n) {
        float tail[block_entries] = {};
        std::memcpy(tail, x + whole, (n - whole) * sizeof(float));
        all.take(tail);
    }
    std::uint64_t sum = mixed(n);
    for (const std::uint64_t state : all.state) sum = mixed(sum ^ state) * odd;
    return mixed(sum);
}

}  // namespace atoll_kernels
