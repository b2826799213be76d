#include "ledger.hpp"

#include <algorithm>
#include <utility>

namespace atoll_kernels {

std::size_t Ledger::place_of(std::uint64_t rank) const {
    const std::vector<int>& mates = islands_->mates();
    const auto at = std::find_if(mates.begin(), mates.end(),
                                 [rank](int mate) { return static_cast<std::uint64_t>(mate) == rank; });
    return static_cast<std::size_t>(at - mates.begin());
}

Ledger::Open& Ledger::open(std::int64_t step) {
    const auto [at, is_new] = open_.try_emplace(step);
    if (is_new) {
        const std::size_t mates = islands_->mates().size(), islands = islands_->members.size();
        at->second = {std::vector<Entry>(mates), std::vector<Entry>(islands), mates, islands, false};
    }
    return at->second;
}

const Ledger::Open* Ledger::find(std::int64_t step) const {
    const auto at = open_.find(step);
    return at == open_.end() ? nullptr : &at->second;
}

const char* Ledger::refusal(MessageKind kind, std::uint64_t origin, std::uint64_t step) const {
    const bool part = kind == MessageKind::part;
    const std::size_t place = part ? place_of(origin) : origin;
    const std::size_t end = part ? islands_->mates().size() : islands_->members.size();
    if (place >= end || place == (part ? islands_->place : islands_->mine)) return "from nobody";
    const std::int64_t newest = compressed_ + steps_ahead;
    if (newest < 0 || step > static_cast<std::uint64_t>(newest)) return "step too far ahead";
    const auto signed_step = static_cast<std::int64_t>(step);
    if (signed_step <= version_) return "old step";
    const Open* const known = find(signed_step);
    if (known != nullptr && (part ? known->parts : known->sums)[place].claimed) return "twice";
    return nullptr;
}

void Ledger::claim(MessageKind kind, std::uint64_t origin, std::int64_t step) {
    Open& at = open(step);
    (kind == MessageKind::part ? at.parts[place_of(origin)] : at.sums[origin]).claimed = true;
}

bool Ledger::put_part(std::int64_t step, std::size_t place, SharedPart part) {
    Open& at = open(step);
    at.parts[place] = {true, std::move(part)};
    return --at.parts_missing == 0;
}

bool Ledger::put_sum(std::int64_t step, std::size_t island, SharedPart sum) {
    Open& at = open(step);
    at.sums[island] = {true, std::move(sum)};
    return --at.sums_missing == 0;
}

std::vector<SharedPart> Ledger::take_parts(std::int64_t step) {
    std::vector<SharedPart> parts;
    for (Entry& entry : open(step).parts) parts.push_back(std::exchange(entry.part, nullptr));
    return parts;
}

bool Ledger::next_is_complete() const {
    const Open* const next = find(version_ + 1);
    return next != nullptr && next->sums_missing == 0 && !next->taken;
}

bool Ledger::next_is_taken() const {
    const Open* const next = find(version_ + 1);
    return next != nullptr && next->taken;
}

std::vector<SharedPart> Ledger::take_next_sums() {
    Open& next = open(version_ + 1);
    next.taken = true;
    std::vector<SharedPart> sums;
    for (Entry& entry : next.sums) sums.push_back(std::exchange(entry.part, nullptr));
    return sums;
}

void Ledger::close_next() {
    open_.erase(++version_);
}

std::vector<std::string> Ledger::missing() const {
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

void Ledger::note_missing_parts(const Open* next, std::vector<std::string>& missing) const {
    if (compressed_ <= version_)
        missing.push_back("part of rank " + std::to_string(islands_->rank) + ", this one, is missing (not compressed)");
    if (next != nullptr && next->parts_missing == 0) return;  // the parts themselves are in the sum already
    for (std::size_t place = 0; place < islands_->mates().size(); ++place) {
        if (place == islands_->place || (next != nullptr && next->parts[place].part != nullptr)) continue;
        missing.push_back("part of rank " + std::to_string(islands_->mates()[place]) + " is missing");
    }
}

}  // namespace atoll_kernels
