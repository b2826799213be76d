#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../cpu/select/compress.hpp"
#include "../../cpu/select/difference.hpp"
#include "parts.hpp"
#include "threshold_controller.hpp"

namespace atoll_kernels {

enum class SelectionRule { threshold, topk, random };

// This step's gradient of one tensor, or, of UpdateEngine, this rank's own weights after its update, as handed over.
struct Gradient {
    const void* data = nullptr;  // null: none, only the residual
    ValueFormat format = ValueFormat::float32;
    float weight = 0;  // what it counts in the sum of all ranks
    std::size_t k_blocks = 0;
    std::shared_ptr<const void> owner{};  // keeps `data` alive
    std::uint64_t takes = 0;            // how often changes for those weights were taken before they were copied
    SharedPart chosen{};  // not null: blocks of a gradient or difference elsewhere, with what `selection` counted there
    Selection selection{0, 0, 0};
    std::vector<float> sample{};        // of chosen blocks of live weights elsewhere: as Drift::before takes it
};

struct Selected {
    Selection selection;
    EncodedPart encoded;
};

// Chooses a tensor's part, sync round after sync round. One caller at a time.
class Selector {
  public:
    // samples: each round's threshold comes from a sample of it, not from how many blocks the rounds before chose. What
    // was sent of a difference is gone from it, so that those counts swing, and a fifth of what may be sent is not.
    Selector(SelectionRule rule, float* residual, std::size_t entries, bool samples)
        : rule_(rule), residual_(residual), entries_(entries), samples_(samples), controller_(1) {}

    // At most gradient.k_blocks blocks of residual + weight * gradient; the rest, and what rounding to the wire's
    // format takes away, stays in the residual. Without a residual both are lost.
    Selected select(const Gradient& gradient, const Format& format, Scratch& scratch);

    // The blocks that were chosen elsewhere. What rounding them took away stays here, until they are chosen again.
    Selected encode(const Gradient& gradient, const Format& format, Scratch& scratch);

    // At most k_blocks blocks of what this rank has not sent. What rounding takes away stays in the difference by
    // itself.
    Selected select(const Difference& of, std::size_t k_blocks, const Format& format, Scratch& scratch);

  private:
    template <typename Sample, typename Choose>
    Selection choose_above(const Format& format, const Chosen& to, Scratch& scratch, const Sample& sample,
                           const Choose& choose_blocks);
    Selection choose(const Source& from, const Format& format, const Chosen& to, Scratch& scratch);
    Selection choose_nothing(const Format& format, const Chosen& to) const;

    SelectionRule rule_;
    float* residual_;
    std::size_t entries_;
    bool samples_;
    ThresholdController controller_;
};

}  // namespace atoll_kernels
