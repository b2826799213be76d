#include "pending_updates.hpp"

#include <utility>

namespace atoll_kernels {

void PendingUpdates::add(std::int64_t sync_round, SharedPart part, float factor) {
    if (part->count != 0) open_.push_back({sync_round, std::move(part), factor});
}

void PendingUpdates::close_round(std::int64_t sync_round, const Units& total) {
    // Small numbers are added to each other first: live is rounded once, and one rank alone gets exact zeros.
    Part sum = plus(unpublished_.units(), total, -1);
    for (const OfRound& one : open_) {
        if (one.sync_round == sync_round) sum = plus(sum.units(), one.part->units(), one.factor);
    }
    unpublished_ = std::move(sum);
    std::erase_if(open_, [sync_round](const OfRound& one) { return one.sync_round == sync_round; });
}

Part PendingUpdates::take() { return std::exchange(unpublished_, Part()); }

void PendingUpdates::note_taken(Part changed) {
    const std::uint64_t number = takes_ + 1;
    if (changed.count != 0) taken_.push_back({number, std::make_shared<const Part>(std::move(changed))});
    takes_ = number;
}

std::vector<PendingUpdate> PendingUpdates::missing_from_copy(std::uint64_t takes) const {
    std::vector<PendingUpdate> all;
    for (const Taken& one : taken_) {
        if (one.number > takes) all.push_back({one.part->units(), 1});
    }
    if (unpublished_.count != 0) all.push_back({unpublished_.units(), 1});
    for (const OfRound& one : open_) all.push_back({one.part->units(), one.factor});
    return all;
}

void PendingUpdates::forget(std::uint64_t takes) {
    while (!taken_.empty() && taken_.front().number <= takes) taken_.pop_front();
}

}  // namespace atoll_kernels
