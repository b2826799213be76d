#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "../../cpu/optimizer/sparse_optimizer.hpp"
#include "../parts/parts.hpp"

namespace atoll_kernels {

// Writes into one tensor's live weights, and remembers what 16 bits take away: at any time live + lost is what was
// meant. Others' updates are mostly smaller than a step of 16 bits. Forgotten where they are rounded, they would be
// missing from live, and this rank would send the opposite to the shared parameters as if it were an update of its own.
//
// Live weights of float32 lose nothing here. Those kept elsewhere are followed by a copy. Knows nothing of threads: one
// caller at a time.
class LiveRounding {
  public:
    explicit LiveRounding(std::size_t entries) : entries_(entries) {}

    // [entries]; null: nothing was rounded yet. 0 where live is not finite.
    const float* lost() const { return lost_.get(); }

    // live += update, with what was lost before.
    void add(const Live& live, const Units& update);

    // live = shared_param - factor * residual; residual null: 0.
    void set(const Live& live, const float* shared_param, const float* residual, float factor);

    // Weights that are kept elsewhere are these now.
    void note_copy(const Live& copy);

    // Somebody adds `update` to the weights that are kept elsewhere: it gets what was lost before. Returns what changes
    // in those weights thereby.
    Part add_to_copy(Part& update);

  private:
    void begin();  // to remember

    std::size_t entries_;
    std::unique_ptr<float[]> lost_;
    std::unique_ptr<std::uint16_t[]> copy_;  // null: of float32, or none was noted
    ValueFormat copy_format_ = ValueFormat::float32;
};

}  // namespace atoll_kernels
