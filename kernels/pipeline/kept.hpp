#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "parts.hpp"

// One tensor's state of one step, for somebody who writes it down while later steps go on: it is copied when it is asked
// for, or right before a later step changes it. Knows nothing of threads: one caller at a time.
namespace atoll_kernels {

struct KeptRange {
    const unsigned char* from;
    unsigned char* to;
    std::size_t bytes;
    std::shared_ptr<const void> from_owner, to_owner;
};

// What updates change: masters and moments.
class KeptRanges {
  public:
    KeptRanges() = default;
    KeptRanges(std::int64_t step, std::vector<KeptRange> ranges) : step_(step), ranges_(std::move(ranges)) {}

    // `step` is about to be applied or carried.
    void before(std::int64_t step) {
        if (step_ < step) copy();
    }
    bool is_of(std::int64_t step) const { return step_ == step; }

    // Each range once.
    void copy();

  private:
    std::int64_t step_ = -1;
    std::vector<KeptRange> ranges_;  // not copied yet
};

// What this rank owes: a residual that the next part is chosen from, or a difference that was written down already.
class KeptOwed {
  public:
    KeptOwed() = default;

    // residual [entries]; null: out [entries] has it.
    KeptOwed(std::int64_t step, const float* residual, float* out, std::size_t entries,
             std::shared_ptr<const void> out_owner)
        : step_(step), residual_(residual), out_(out), entries_(entries), out_owner_(std::move(out_owner)) {}

    // This rank's part of `step` is about to be chosen.
    void before(std::int64_t step) {
        if (step_ < step) copy();
    }
    bool is_of(std::int64_t step) const { return step_ == step; }
    void copy();

    // Rounding the sum of `step` took `lost` away, which this rank owes again. Read before, it is added now.
    bool misses(std::int64_t step) const { return out_ != nullptr && residual_ == nullptr && step <= step_; }
    void add(const Units& lost);

    // Nothing is added any more.
    void finish() {
        copy();
        out_ = nullptr;
        out_owner_ = nullptr;
    }

  private:
    std::int64_t step_ = -1;
    const float* residual_ = nullptr;
    float* out_ = nullptr;
    std::size_t entries_ = 0;
    std::shared_ptr<const void> out_owner_;
};

}  // namespace atoll_kernels
