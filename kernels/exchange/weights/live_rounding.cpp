#include "live_rounding.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../cpu/codec/half.hpp"

namespace atoll_kernels {
namespace {

template <ValueFormat format>
ATOLL_INLINE float widened(std::uint16_t bits) {
    return format == ValueFormat::float16 ? from_float16(bits) : from_bfloat16(bits);
}

// to [n] = exact, rounded; lost [n] the rest.
template <ValueFormat format>
ATOLL_INLINE void write_one(float exact, std::uint16_t& to, float& lost) {
    to = format == ValueFormat::float16 ? to_float16(exact) : to_bfloat16(exact);
    const float rest = exact - widened<format>(to);
    lost = std::fabs(rest) <= largest_bfloat16 ? rest : 0.0F;  // neither a NaN nor an infinity
}

template <ValueFormat format>
void add_narrow(std::uint16_t* to, std::size_t n, const float* values, float* lost) {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < n; ++i)
        write_one<format>(widened<format>(to[i]) + (values[i] + lost[i]), to[i], lost[i]);
}

template <ValueFormat format>
void set_narrow(std::uint16_t* to, std::size_t n, const float* shared_param, const float* residual, float factor,
                float* lost) {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < n; ++i)
        write_one<format>(residual == nullptr ? shared_param[i] : shared_param[i] - factor * residual[i], to[i],
                          lost[i]);
}

// As add_narrow; values becomes what is to be added to `copy`, changed [n] what `copy` changes by.
template <ValueFormat format>
void add_to_copied(std::uint16_t* copy, std::size_t n, float* values, float* changed, float* lost) {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < n; ++i) {
        const float before = widened<format>(copy[i]);
        values[i] += lost[i];
        write_one<format>(before + values[i], copy[i], lost[i]);
        const float change = widened<format>(copy[i]) - before;
        changed[i] = std::fabs(change) <= largest_bfloat16 ? change : 0.0F;
    }
}

}  // namespace

void LiveRounding::begin() {
    if (lost_ == nullptr) lost_ = std::make_unique<float[]>(entries_);
}

void LiveRounding::add(const Live& live, const Units& update) {
    constexpr std::size_t ahead = 16;
    const std::size_t bytes = live.format == ValueFormat::float32 ? 4 : 2;
    if (live.format != ValueFormat::float32) begin();
    for (std::size_t k = 0; k < update.count; ++k) {
        if (k + ahead < update.count)
            __builtin_prefetch(static_cast<char*>(live.data) + update.index[k + ahead] * block_entries * bytes, 1);
        const std::size_t at = update.index[k] * block_entries, n = std::min(block_entries, entries_ - at);
        const float* const values = update.values + k * block_entries;
        auto* const narrow = static_cast<std::uint16_t*>(live.data) + at;
        switch (live.format) {
            case ValueFormat::float32: {
                float* const to = static_cast<float*>(live.data) + at;
                for (std::size_t i = 0; i < n; ++i) to[i] += values[i];
                break;
            }
            case ValueFormat::float16: add_narrow<ValueFormat::float16>(narrow, n, values, lost_.get() + at); break;
            case ValueFormat::bfloat16: add_narrow<ValueFormat::bfloat16>(narrow, n, values, lost_.get() + at); break;
        }
    }
}

void LiveRounding::set(const Live& live, const float* shared_param, const float* residual, float factor) {
    auto* const narrow = static_cast<std::uint16_t*>(live.data);
    switch (live.format) {
        case ValueFormat::float32: {
            float* const to = static_cast<float*>(live.data);
            for (std::size_t i = 0; i < entries_; ++i)
                to[i] = residual == nullptr ? shared_param[i] : shared_param[i] - factor * residual[i];
            return;
        }
        case ValueFormat::float16:
            begin();
            return set_narrow<ValueFormat::float16>(narrow, entries_, shared_param, residual, factor, lost_.get());
        case ValueFormat::bfloat16:
            begin();
            return set_narrow<ValueFormat::bfloat16>(narrow, entries_, shared_param, residual, factor, lost_.get());
    }
}

void LiveRounding::note_copy(const Live& copy) {
    if (copy.format == ValueFormat::float32) return;
    begin();
    if (copy_ == nullptr) copy_ = std::make_unique_for_overwrite<std::uint16_t[]>(entries_);
    copy_format_ = copy.format;
    std::memcpy(copy_.get(), copy.data, entries_ * sizeof *copy_.get());
}

Part LiveRounding::add_to_copy(Part& update) {
    Part changed(update.count);
    std::copy_n(update.index.get(), update.count, changed.index.get());
    std::copy_n(update.values.get(), update.count * block_entries, changed.values.get());
    if (copy_ == nullptr) return changed;
    for (std::size_t k = 0; k < update.count; ++k) {
        const std::size_t at = update.index[k] * block_entries, n = std::min(block_entries, entries_ - at);
        float* const values = update.values.get() + k * block_entries;
        float* const changes = changed.values.get() + k * block_entries;
        if (copy_format_ == ValueFormat::float16)
            add_to_copied<ValueFormat::float16>(copy_.get() + at, n, values, changes, lost_.get() + at);
        else
            add_to_copied<ValueFormat::bfloat16>(copy_.get() + at, n, values, changes, lost_.get() + at);
    }
    return changed;
}

}  // namespace atoll_kernels
