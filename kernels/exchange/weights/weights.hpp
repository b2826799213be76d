#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../cpu/optimizer/sparse_optimizer.hpp"

namespace atoll_kernels {

// One tensor's float32 shared parameters with the optimizer's state, the model's own copy of them (`live`; may be
// none), and which blocks differ between the two. Knows nothing of threads: one caller at a time.
class Weights {
  public:
    // parameters.live is brought up to date by publish alone, never in between: a forward or backward pass reads it.
    explicit Weights(const Parameters& parameters);

    std::size_t entries() const { return parameters_.n; }
    bool has_live() const { return live_.data != nullptr; }
    bool has_first() const { return parameters_.first != nullptr; }

    // Blocks that are not finite are left out.
    void update(const Units& total, const Hyperparameters& hyper);

    const float* shared_param() const { return parameters_.shared_param; }
    const Live& live() const { return live_; }

    // shared_param += factor * update for a moment. saved [update.count, 16] gets what was there, for `put_back`.
    void shift(const Units& update, float factor, float* saved);
    void put_back(const Units& update, const float* saved);

    // Copies the blocks changed since the last call into live.
    void publish();

    // Blocks that somebody who keeps a copy shall be told again.
    void mark_changed(const Units& blocks);
    // Somebody has all of the shared parameter as it is.
    void forget_changes();

    std::size_t changed_blocks() const;

    // The same blocks for somebody who keeps the copy: index [changed_blocks], values [changed_blocks, 16], the last
    // block's beyond the tensor's end 0.
    void take_changes(std::uint32_t* index, float* values);

    // 64 bits that tell float32 shared parameters apart: any change of one value changes them, and two that differ have
    // the same with a chance of about 2^-64. The same everywhere; no protection against somebody who wants two to be
    // equal. Bound by memory: reads 4n bytes.
    std::uint64_t digest() const;

  private:
    template <typename Visit>
    void visit_changed(const Visit& visit);
    template <typename Visit>
    void visit_blocks(const Units& update, const Visit& visit) const;

    Parameters parameters_;  // without live
    Live live_;
    std::vector<std::uint64_t> changed_;  // a bit for each block
};

}  // namespace atoll_kernels
