#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "../parts/parts.hpp"

namespace atoll_kernels {

// Something that live weights lack: live += factor * units.
struct PendingUpdate {
    Units units;
    float factor;
};

// Exchanging updates: what one rank's live weights of a tensor lack, so that at any time
//     live + all that is pending = shared_param - residual / weight,
// residual being what this rank has not sent, and weight what its updates count in the shared parameters. Knows nothing
// of threads but in `takes`: one caller at a time.
class PendingUpdates {
  public:
    // A part was taken out of this rank's residual (factor > 0), or put back (factor < 0), in a round to come.
    void add(std::int64_t sync_round, SharedPart part, float factor) {
        if (part->count != 0) open_.push_back({sync_round, std::move(part), factor});
    }

    // `total` of `sync_round` was taken off the shared parameter. Rounds ascend.
    void close_round(std::int64_t sync_round, const Units& total) {
        // Small numbers are added to each other first: live is rounded once, and one rank alone gets exact zeros.
        Part sum = plus(unpublished_.units(), total, -1);
        for (const OfRound& one : open_) {
            if (one.sync_round == sync_round) sum = plus(sum.units(), one.part->units(), one.factor);
        }
        unpublished_ = std::move(sum);
        std::erase_if(open_, [sync_round](const OfRound& one) { return one.sync_round == sync_round; });
    }

    // The sum that live lacks of the closed rounds; of others it must not have anything yet.
    const Part& unpublished() const { return unpublished_; }

    // The unpublished was added to live, which is the only copy.
    void mark_published() { unpublished_ = Part(); }

    // Hands the unpublished to somebody who adds it to weights kept elsewhere; `note_taken` follows.
    Part take() { return std::exchange(unpublished_, Part()); }

    // Those weights changed by so much. Copies of them that were made before are still to be compressed, so it is
    // remembered until a later copy is.
    void note_taken(Part changed) {
        const std::uint64_t number = takes_ + 1;
        if (changed.count != 0) taken_.push_back({number, std::make_shared<const Part>(std::move(changed))});
        takes_ = number;
    }

    // The number of times the unpublished was taken; from any thread.
    std::uint64_t takes() const { return takes_; }

    // The updates that a copy of live lacks that was made after so many takes. Valid until the next change.
    std::vector<PendingUpdate> missing_from_copy(std::uint64_t takes) const {
        std::vector<PendingUpdate> all;
        for (const Taken& one : taken_) {
            if (one.number > takes) all.push_back({one.part->units(), 1});
        }
        if (unpublished_.count != 0) all.push_back({unpublished_.units(), 1});
        for (const OfRound& one : open_) all.push_back({one.part->units(), one.factor});
        return all;
    }

    // No copy made after fewer takes will be asked about again.
    void forget(std::uint64_t takes) {
        while (!taken_.empty() && taken_.front().number <= takes) taken_.pop_front();
    }

  private:
    struct OfRound {
        std::int64_t sync_round;
        SharedPart part;
        float factor;
    };
    struct Taken {
        std::uint64_t number;
        SharedPart part;
    };

    std::deque<OfRound> open_;  // of rounds that are not closed
    Part unpublished_;          // one sum, so that it does not grow while nobody asks for it
    std::deque<Taken> taken_;
    std::atomic<std::uint64_t> takes_{0};
};

}  // namespace atoll_kernels
