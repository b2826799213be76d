#include "selector.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "../../cpu/codec/half.hpp"
#include "../../cpu/processor/features.hpp"

namespace atoll_kernels {
namespace {

constexpr std::size_t sampled_blocks = 4096;  // 40 of them above the threshold at a sparsity of 99 %

template <float widen(std::uint16_t)>
ATOLL_INLINE void widen_all(const std::uint16_t* from, std::size_t n, float* to) {
    for (std::size_t i = 0; i < n; ++i) to[i] = widen(from[i]);
}

ATOLL_INLINE void widen(const Gradient& gradient, std::size_t n, float* to) {
    const auto* const from = static_cast<const std::uint16_t*>(gradient.data);
    if (gradient.format == ValueFormat::float16) return widen_all<from_float16>(from, n, to);
    widen_all<from_bfloat16>(from, n, to);
}

const float* as_float32(const Gradient& gradient, std::size_t n, Scratch& scratch) {
    if (gradient.format == ValueFormat::float32) return static_cast<const float*>(gradient.data);
    float* const wide = scratch.gradient.of(n);
    run_on<widen>(best_path(), gradient, n, wide);
    return wide;
}

}  // namespace

Selected Selector::select(const Gradient& gradient, const Format& format, Scratch& scratch) {
    const std::size_t capacity = std::min(gradient.k_blocks, format.blocks());
    const Chosen to{scratch.index.of(capacity), scratch.values.of(capacity * block_entries), capacity};
    controller_.aim_at(gradient.k_blocks);
    Selection selection;
    if (gradient.data != nullptr && gradient.weight != 0) {
        const float* const values = as_float32(gradient, entries_, scratch);
        selection = choose({values, residual_, gradient.weight, entries_}, format, to, scratch);
    } else if (residual_ != nullptr) {
        // 0 * residual adds nothing to what is finite, and the residual always is.
        selection = choose({residual_, residual_, 0, entries_}, format, to, scratch);
    } else {
        selection = choose_nothing(format, to);
    }
    return {selection, encode_part(format, {to.index, to.values, selection.chosen}, residual_, scratch)};
}

Selected Selector::encode(const Gradient& gradient, const Format& format, Scratch& scratch) {
    const Units units = gradient.chosen->units();
    float* const values = scratch.values.of(units.count * block_entries);
    std::copy_n(units.values, units.count * block_entries, values);
    for (std::size_t k = 0; residual_ != nullptr && k < units.count; ++k) {
        const std::size_t begin = units.index[k] * block_entries, end = std::min(entries_, begin + block_entries);
        for (std::size_t i = begin; i < end; ++i)
            values[k * block_entries + i - begin] += std::exchange(residual_[i], 0.0F);
    }
    return {gradient.selection, encode_part(format, {units.index, values, units.count}, residual_, scratch)};
}

Selected Selector::select(const Difference& of, std::size_t k_blocks, const Format& format, Scratch& scratch) {
    const std::size_t capacity = std::min(k_blocks, format.blocks());
    const Chosen to{scratch.index.of(capacity), scratch.values.of(capacity * block_entries), capacity};
    controller_.aim_at(k_blocks);
    Selection selection;
    if (rule_ == SelectionRule::threshold) {
        selection = choose_above(
            format, to, scratch,
            [&](std::size_t count, float* scores) { difference_scores(of, format.seed, count, scores); },
            [&](float threshold) { return difference_block(of, threshold, to, 1, best_path()); });
    } else {
        float* const d = scratch.gradient.of(entries_);
        difference(of, d, best_path());
        selection = choose({d, nullptr, 1, entries_}, format, to, scratch);
    }
    return {selection, encode_part(format, {to.index, to.values, selection.chosen}, nullptr, scratch)};
}

template <typename Sample, typename Choose>
Selection Selector::choose_above(const Format& format, const Chosen& to, Scratch& scratch, const Sample& sample,
                                 const Choose& choose_blocks) {
    const std::size_t blocks = format.blocks();
    if (to.capacity == blocks) return choose_blocks(0.0F);
    if (samples_ || controller_.needs_sample()) {
        const std::size_t count = std::min(blocks, sampled_blocks);
        float* const scores = scratch.scores.of(count);
        sample(count, scores);
        controller_.start(scores, count, blocks);
    }
    const double largest = std::numeric_limits<float>::max();
    const Selection selection = choose_blocks(static_cast<float>(std::min(controller_.threshold(), largest)));
    controller_.update(selection.found);
    return selection;
}

Selection Selector::choose(const Source& from, const Format& format, const Chosen& to, Scratch& scratch) {
    const Path path = best_path();
    if (rule_ == SelectionRule::topk) return topk_block(from, to, 1, path);
    if (rule_ == SelectionRule::random) return random_block(from, format.seed, to, 1, path);
    return choose_above(
        format, to, scratch, [&](std::size_t count, float* scores) { sample_scores(from, format.seed, count, scores); },
        [&](float threshold) { return threshold_block(from, threshold, to, 1, path); });
}

// A receiver of random blocks expects them, so they are sent as zeros.
Selection Selector::choose_nothing(const Format& format, const Chosen& to) const {
    if (rule_ != SelectionRule::random) return {0, 0, 0};
    random_blocks(format.seed, format.blocks(), to.capacity, to.index);
    std::fill_n(to.values, to.capacity * block_entries, 0.0F);
    return {to.capacity, to.capacity, 0};
}

}  // namespace atoll_kernels
