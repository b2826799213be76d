#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "../parts/parts.hpp"

// One tensor's state of one sync round, for somebody who writes it down while later rounds go on: it is captured when
// it is asked for, or right before a later round changes it. Knows nothing of threads: one caller at a time.
namespace atoll_kernels {

struct SnapshotRange {
    const unsigned char* from;
    unsigned char* to;
    std::size_t bytes;
    std::shared_ptr<const void> from_owner, to_owner;
};

// A snapshot of what updates change: shared parameters and moments.
class StateSnapshot {
  public:
    StateSnapshot() = default;
    StateSnapshot(std::int64_t sync_round, std::vector<SnapshotRange> ranges)
        : sync_round_(sync_round), ranges_(std::move(ranges)) {}

    // `sync_round` is about to be applied or accumulated.
    void before(std::int64_t sync_round) {
        if (sync_round_ < sync_round) capture();
    }
    bool is_of(std::int64_t sync_round) const { return sync_round_ == sync_round; }

    // Copies each range once.
    void capture() {
        for (const SnapshotRange& range : std::exchange(ranges_, {})) std::memcpy(range.to, range.from, range.bytes);
    }

  private:
    std::int64_t sync_round_ = -1;
    std::vector<SnapshotRange> ranges_;  // not captured yet
};

// A snapshot of what this rank has not sent: a residual that the next part is chosen from, or a difference that was
// written down already.
class ResidualSnapshot {
  public:
    ResidualSnapshot() = default;

    // residual [entries]; null: out [entries] has it.
    ResidualSnapshot(std::int64_t sync_round, const float* residual, float* out, std::size_t entries,
                     std::shared_ptr<const void> out_owner)
        : sync_round_(sync_round),
          residual_(residual),
          out_(out),
          entries_(entries),
          out_owner_(std::move(out_owner)) {}

    // This rank's part of `sync_round` is about to be chosen.
    void before(std::int64_t sync_round) {
        if (sync_round_ < sync_round) capture();
    }
    bool is_of(std::int64_t sync_round) const { return sync_round_ == sync_round; }
    void capture() {
        if (residual_ != nullptr) std::copy_n(std::exchange(residual_, nullptr), entries_, out_);
    }

    // Rounding the sum of `sync_round` took something away, which goes back to this rank's residual. Captured before,
    // it is added now.
    bool misses(std::int64_t sync_round) const {
        return out_ != nullptr && residual_ == nullptr && sync_round <= sync_round_;
    }
    void add(const Units& lost) { add_to(out_, entries_, lost); }

    // Nothing is added any more.
    void finish() {
        capture();
        out_ = nullptr;
        out_owner_ = nullptr;
    }

  private:
    std::int64_t sync_round_ = -1;
    const float* residual_ = nullptr;
    float* out_ = nullptr;
    std::size_t entries_ = 0;
    std::shared_ptr<const void> out_owner_;
};

}  // namespace atoll_kernels
