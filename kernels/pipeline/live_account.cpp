#include "live_account.hpp"

#include <utility>

namespace atoll_kernels {

void LiveAccount::note(std::int64_t step, SharedPart part, float factor) {
    if (part->count != 0) noted_.push_back({step, std::move(part), factor});
}

void LiveAccount::close(std::int64_t step, const Units& total) {
    // Small numbers are added to each other first: live is rounded once, and one rank alone gets exact zeros.
    Part due = plus(due_.units(), total, -1);
    for (const Noted& one : noted_) {
        if (one.step == step) due = plus(due.units(), one.part->units(), one.factor);
    }
    due_ = std::move(due);
    std::erase_if(noted_, [step](const Noted& one) { return one.step == step; });
}

Part LiveAccount::take() {
    if (due_.count != 0) taken_.push_back({takes_ + 1, copied(due_.units())});
    ++takes_;
    return std::exchange(due_, Part());
}

std::vector<Lacking> LiveAccount::lacking(std::uint64_t takes) const {
    std::vector<Lacking> all;
    for (const Taken& one : taken_) {
        if (one.number > takes) all.push_back({one.part->units(), 1});
    }
    if (due_.count != 0) all.push_back({due_.units(), 1});
    for (const Noted& one : noted_) all.push_back({one.part->units(), one.factor});
    return all;
}

void LiveAccount::forget(std::uint64_t takes) {
    while (!taken_.empty() && taken_.front().number <= takes) taken_.pop_front();
}

}  // namespace atoll_kernels
