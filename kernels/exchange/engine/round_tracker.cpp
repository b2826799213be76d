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

bool RoundTracker::is_due(std::int64_t sync_round) const {
    const auto holds = [sync_round](const Turns& one) { return one.from <= sync_round; };
    const auto found = std::find_if(turns_.rbegin(), turns_.rend(), holds);
    return sync_round % found->every == found->turn;
}

void RoundTracker::change(Turns turns) {
    turns_.push_back(turns);
    while (turns_.size() > 1 && turns_[1].from <= version_ + 1) turns_.erase(turns_.begin());
}

RoundTracker::Open& RoundTracker::open(std::int64_t sync_round) {
    const auto [at, is_new] = open_.try_emplace(sync_round);
    if (is_new) {
        const std::size_t mates = islands_->mates().size(), islands = islands_->members.size();
        at->second = {std::vector<Entry>(mates), std::vector<Entry>(islands), mates, islands, {}, false};
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
    if (place >= end) return "from nobody";
    if (kind == MessageKind::from_aggregator) {
        if (aggregator_ != place || owns()) return "not from its aggregator";
    } else {
        if (place == (part ? islands_->place : islands_->mine)) return "from nobody";
        const bool for_leader = islands_->follows() || (aggregator_.has_value() && !islands_->leads());
        if (part ? for_leader : kind == MessageKind::to_aggregator ? !owns() : aggregator_.has_value())
            return "not for this rank";
    }
    const std::int64_t newest = compressed_ + rounds_ahead;
    if (newest < 0 || sync_round > static_cast<std::uint64_t>(newest)) return "round too far ahead";
    const auto signed_round = static_cast<std::int64_t>(sync_round);
    if (signed_round <= version_) return "old round";
    if (signed_round <= compressed_ && !is_due(signed_round)) return "not its turn";  // later ones' may change yet
    const Open* const known = find(signed_round);
    return known != nullptr && entry(*known, kind, place).claimed ? "twice" : nullptr;
}

void RoundTracker::claim(MessageKind kind, std::uint64_t origin, std::int64_t sync_round) {
    const std::size_t place = kind == MessageKind::part ? place_of(origin) : origin;
    entry(open(sync_round), kind, place).claimed = true;
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

void RoundTracker::put_total(std::int64_t sync_round, SharedPart total) {
    open(sync_round).total = {true, std::move(total)};
}

std::vector<SharedPart> RoundTracker::take_parts(std::int64_t sync_round) {
    std::vector<SharedPart> parts;
    for (Entry& entry : open(sync_round).parts) parts.push_back(std::exchange(entry.part, nullptr));
    return parts;
}

std::vector<SharedPart> RoundTracker::take_sums(Open& next) {
    std::vector<SharedPart> sums;
    for (Entry& entry : next.sums) sums.push_back(std::exchange(entry.part, nullptr));
    return sums;
}

bool RoundTracker::aggregator_may_total() const {
    if (!owns()) return false;
    const Open* const next = find(version_ + 1);
    return next != nullptr && next->sums_missing == 0 && !next->sums_taken;
}

std::vector<SharedPart> RoundTracker::take_owned_sums() {
    Open& next = open(version_ + 1);
    next.sums_taken = true;
    return take_sums(next);
}

bool RoundTracker::next_is_complete() const {
    if (taken_ > version_) return false;
    if (!is_due(version_ + 1)) return true;
    const Open* const next = find(version_ + 1);
    if (next == nullptr) return false;
    return aggregator_.has_value() ? next->total.part != nullptr : next->sums_missing == 0;
}

std::vector<SharedPart> RoundTracker::take_next_sums() {
    taken_ = version_ + 1;
    if (!is_due(taken_)) return {};
    Open& next = open(taken_);
    if (aggregator_.has_value()) return {std::exchange(next.total.part, nullptr)};
    return take_sums(next);
}

void RoundTracker::close_next() { open_.erase(++version_); }

std::vector<std::string> RoundTracker::missing() const {
    std::vector<std::string> missing;
    const Open* const next = find(version_ + 1);
    if (taken_ > version_ || !is_due(version_ + 1)) return missing;
    note_missing_parts(next, missing);
    if (aggregator_.has_value() && !owns()) {
        if (next != nullptr && next->total.part != nullptr) return {};
        missing.push_back("total of island " + std::to_string(*aggregator_) + ", its aggregator, is missing");
        return missing;
    }
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
    if (aggregator_.has_value() && !islands_->leads()) return;
    if (next != nullptr && next->parts_missing == 0) return;  // the parts themselves are in the sum already
    for (std::size_t place = 0; place < islands_->mates().size(); ++place) {
        if (place == islands_->place || (next != nullptr && next->parts[place].part != nullptr)) continue;
        missing.push_back("part of rank " + std::to_string(islands_->mates()[place]) + " is missing");
    }
}

}  // namespace atoll_kernels
