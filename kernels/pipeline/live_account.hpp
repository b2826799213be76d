#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "parts.hpp"

namespace atoll_kernels {

// Something live lacks: live += factor * units.
struct Lacking {
    Units units;
    float factor;
};

// Exchanging updates: what one rank's live weights of a tensor lack, so that at any time
//     live + all that is noted here = master - ranks * owed,
// owed being what this rank has not sent. Knows nothing of threads but in `takes`: one caller at a time.
class LiveAccount {
  public:
    // A part was taken out of what this rank owes (factor > 0), or put back (factor < 0), in a step to come.
    void note(std::int64_t step, SharedPart part, float factor);

    // `total` of `step` was taken off the master. Steps ascend.
    void close(std::int64_t step, const Units& total);

    // What live lacks of the closed steps; of others it must not have anything yet.
    const Part& due() const { return due_; }

    // Due was added to live, which is the only copy.
    void settle() { due_ = Part(); }

    // Hands due to somebody who adds it to weights kept elsewhere. Copies of those that were made before are still
    // to be compressed, so it is remembered until a later copy is.
    Part take();

    // How often due was taken; from any thread.
    std::uint64_t takes() const { return takes_; }

    // What a copy of live lacks that was made after so many takes. Valid until the next change.
    std::vector<Lacking> lacking(std::uint64_t takes) const;

    // No copy made after fewer takes will be asked about again.
    void forget(std::uint64_t takes);

  private:
    struct Noted {
        std::int64_t step;
        SharedPart part;
        float factor;
    };
    struct Taken {
        std::uint64_t number;
        SharedPart part;
    };

    std::deque<Noted> noted_;  // of steps that are not closed
    Part due_;                 // one sum, so that it does not grow while nobody asks for it
    std::deque<Taken> taken_;
    std::atomic<std::uint64_t> takes_{0};
};

}  // namespace atoll_kernels
