#include "round_tracker.hpp"

#include <algorithm>
#include <utility>

namespace atoll_kernels {

std::size_t RoundTracker::place_of(std::uint64_t rank) const {
    const std::vector<int>& mates = islands_->mates();
    const auto at =
        std::find_if(mates.begin(), mates.end(), [rank](int mate) { return static_cast<std::uint64_t>(mate) == rank; });
    return static_cast<std::size_t>(at - mates.begin());
}

RoundTracker::Open& RoundTracker::open(std::int64_t sync_round) {
    const auto [at, is_new] = open_.try_emplace(sync_round);
    if (is_new) {
        const std::size_t mates = islands_->mates().size(), islands = islands_->members.size();
        at->second = {std::vector<Entry>(mates), std::vector<Entry>(islands), mates, islands, false};
    }
    return at->second;
}

const RoundTracker::Open* RoundTracker::find(std::int64_t sync_round) const {
    const auto at = open_.find(sync_round);
    return at == open_.end() ? nullptr : &at->second;
}

const char* RoundTracker::refusal(MessageKind kind, std::uint64_t origin, std::uint64_t sync_round) const {
    const bool part = kind == MessageKind::part;
    const std::size_t place = part ? place_of(origin) : origin;
    const std::size_t end = part ? islands_->mates().size() : islands_->members.size();
    if (place >= end || place == (part ? islands_->place : islands_->mine)) return "from nobody";
    const std::int64_t newest = compressed_ + rounds_ahead;
    if (newest < 0 || sync_round > static_cast<std::uint64_t>(newest)) return "round too far ahead";
    const auto signed_round = static_cast<std::int64_t>(sync_round);
    if (signed_round <= version_) return "old round";
    const Open* const known = find(signed_round);
    if (known != nullptr && (part ? known->parts : known->sums)[place].claimed) return "twice";
    return nullptr;
}

void RoundTracker::claim(MessageKind kind, std::uint64_t origin, std::int64_t sync_round) {
    Open& at = open(sync_round);
    (kind == MessageKind::part ? at.parts[place_of(origin)] : at.sums[origin]).claimed = true;
}

bool RoundTracker::put_part(std::int64_t sync_round, std::size_t place, SharedPart part) {
    Open& at = open(sync_round);
    at.parts[place] = {true, std::move(part)};
    return --at.parts_missing == 0;
}

bool RoundTracker::put_sum(std::int64_t sync_round, std::size_t island, SharedPart sum) {
    Open& at = open(sync_round);
    at.sums[island] = {true, std::move(sum)};
    return --at.sums_missing == 0;
}

std::vector<SharedPart> RoundTracker::take_parts(std::int64_t sync_round) {
    std::vector<SharedPart> parts;
    for (Entry& entry : open(sync_round).parts) parts.push_back(std::exchange(entry.part, nullptr));
    return parts;
}

bool RoundTracker::next_is_complete() const {
    const Open* const next = find(version_ + 1);
    return next != nullptr && next->sums_missing == 0 && !next->taken;
}

std::vector<SharedPart> RoundTracker::take_next_sums() {
    Open& next = open(version_ + 1);
    next.taken = true;
    std::vector<SharedPart> sums;
    for (Entry& entry : next.sums) sums.push_back(std::exchange(entry.part, nullptr));
    return sums;
}

void RoundTracker::close_next() { open_.erase(++version_); }

std::vector<std::string> RoundTracker::missing() const {
    std::vector<std::string> missing;
    const Open* const next = find(version_ + 1);
    note_missing_parts(next, missing);
    for (std::size_t island = 0; island < islands_->members.size(); ++island) {
        if (island != islands_->mine && (next == nullptr || next->sums[island].part == nullptr))
            missing.push_back("sum of island " + std::to_string(island) + " is missing");
    }
    if (next != nullptr && next->sums_missing == 0) missing.clear();
    return missing;
}

void RoundTracker::note_missing_parts(const Open* next, std::vector<std::string>& missing) const {
    if (compressed_ <= version_)
        missing.push_back("part of rank " + std::to_string(islands_->rank) + ", this one, is missing (not compressed)");
    if (next != nullptr && next->parts_missing == 0) return;  // the parts themselves are in the sum already
    for (std::size_t place = 0; place < islands_->mates().size(); ++place) {
        if (place == islands_->place || (next != nullptr && next->parts[place].part != nullptr)) continue;
        missing.push_back("part of rank " + std::to_string(islands_->mates()[place]) + " is missing");
    }
}

}  // namespace atoll_kernels
