#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

namespace atoll_kernels {

// The loop that finds the threshold of cache-aware threshold-v: from one sync round's count of blocks to the next
// threshold. Too many chosen: it rises by a share of itself; too few: it is lowered by that share. The share doubles
// from the third round in one direction on and is quartered when the direction turns: a turn costs less than it
// overshot, so the loop comes to rest, and yet it follows gradients that shrink or grow by orders of magnitude.
// The same counts give the same thresholds, bit for bit those of its twin, tests/kernels/threshold_twin.py.
// Source: StellaTrain (SIGCOMM '24), section 3.2; the start from a sample and the changing share are ours.
class ThresholdController {
  public:
    explicit ThresholdController(std::size_t target) : target_(target) {}

    double threshold() const { return threshold_; }
    void aim_at(std::size_t target) { target_ = target; }  // blocks a sync round, 1 or more

    bool needs_sample() const { return off_for_ >= lost_updates; }

    // scores [count] of blocks drawn evenly out of `blocks`; -1: not finite.
    double start(const float* scores, std::size_t count, std::size_t blocks) {
        std::vector<double> known;
        for (std::size_t k = 0; k < count; ++k) {
            if (scores[k] > 0 && scores[k] <= std::numeric_limits<float>::max()) known.push_back(scores[k]);
        }
        const auto out_of = static_cast<double>(std::max<std::size_t>(blocks, 1));
        const double chosen = static_cast<double>(target_ * count) / out_of;
        threshold_ = interpolated(known, chosen);
        share_ = smallest_share;
        direction_ = held_for_ = off_for_ = 0;
        return threshold_;
    }

    double update(std::size_t found) {
        note_if_lost(static_cast<double>(found));
        const int direction = wanted_direction(static_cast<double>(found));
        if (direction == direction_) {
            ++held_for_;
            if (direction != 0 && held_for_ > 2) share_ = std::min(share_ * 2, largest_share);
        } else {
            held_for_ = 1;
            if (direction == 0 || direction_ != 0) share_ = std::max(share_ / 4, smallest_share);
        }
        if (direction > 0) {
            threshold_ += share_ * threshold_;
        } else if (direction < 0) {
            threshold_ /= 1 + share_;
        }
        direction_ = direction;
        return threshold_;
    }

  private:
    static constexpr double band = 0.1;
    static constexpr double smallest_share = 0x1p-9;
    static constexpr double largest_share = 1.0;
    static constexpr double lost_factor = 4.0;
    static constexpr int lost_updates = 2;

    double aim() const { return static_cast<double>(target_); }

    int wanted_direction(double found) const {
        if (found > aim() * (1 + band)) return 1;
        return found < aim() * (1 - band) && threshold_ > 0 ? -1 : 0;
    }

    void note_if_lost(double found) {
        const bool too_many = found > aim() * lost_factor || (threshold_ == 0 && wanted_direction(found) > 0);
        const bool too_few = found * lost_factor < aim() && threshold_ > 0;
        off_for_ = too_many || too_few ? std::min(off_for_ + 1, lost_updates) : 0;
    }

    // Between the two of `scores`, in any order, that so many are above; 0 where there are not so many.
    static double interpolated(std::vector<double>& scores, double chosen) {
        if (scores.empty() || chosen >= static_cast<double>(scores.size())) return 0;
        if (chosen < 1) return *std::max_element(scores.begin(), scores.end());
        const auto above = static_cast<std::size_t>(chosen);
        const double share = chosen - static_cast<double>(above);
        const auto next = scores.begin() + static_cast<std::ptrdiff_t>(above);
        std::nth_element(scores.begin(), next, scores.end(), std::greater<>());
        return *std::min_element(scores.begin(), next) * (1 - share) + *next * share;
    }

    std::size_t target_;
    double threshold_ = 0;
    double share_ = smallest_share;
    int direction_ = 0;
    int held_for_ = 0;
    int off_for_ = lost_updates;
};

}  // namespace atoll_kernels
