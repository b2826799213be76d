#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../cpu/select/difference.hpp"
#include "parts.hpp"

namespace atoll_kernels {

// Squared norms: of what one rank has not sent after a choice, and of what its optimizer did since the choice before.
struct DriftSquares {
    double outstanding = 0, update = 0;
};

// Estimates both for one tensor from a sample of its blocks, the same in every round, so that it costs a look at a few
// cache lines beside the scan that reads all. One caller at a time.
class Drift {
  public:
    static constexpr std::size_t sampled_blocks = 64;

    explicit Drift(std::size_t entries);

    // What is outstanding changed otherwise than by an update and a choice; so is an update before the first choice.
    void forget() { known_ = false; }

    // The blocks of the sample, ascending.
    const std::vector<std::uint32_t>& blocks() const { return index_; }

    // Before the choice: `of` is what was outstanding after the last one, and the updates since.
    void before(const Difference& of);
    // The same of a difference that is elsewhere: its blocks of the sample, [blocks(), 16].
    void before(const std::vector<float>& sample) { before_ = sample; }

    // After it: `sent` is what the receivers read. Of a first choice nothing is known of the update, and all is 0.
    DriftSquares after(const Units& sent);

  private:
    std::size_t blocks_;
    std::vector<std::uint32_t> index_;        // ascending
    std::vector<float> outstanding_, before_; // [index, 16]
    bool known_ = false;
};

}  // namespace atoll_kernels
