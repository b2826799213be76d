// State of one sync round for a checkpoint, captured while later rounds go on.
#include <stdexcept>
#include <string>
#include <utility>

#include "exchange_engine.hpp"

namespace atoll_kernels {
namespace {

[[noreturn]] void refuse_round(std::int64_t sync_round, std::size_t tensor, const std::string& why) {
    throw std::invalid_argument("sync_round = " + std::to_string(sync_round) + " of tensor " + std::to_string(tensor) +
                                " " + why);
}

}  // namespace

void ExchangeEngine::snapshot(std::int64_t sync_round, std::size_t tensor, std::vector<SnapshotRange> ranges) {
    require_open();
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.weights_mutex);
    if (t.weights_version > sync_round)
        refuse_round(sync_round, tensor, "is gone: its weights are of round " + std::to_string(t.weights_version));
    t.snapshot = StateSnapshot(sync_round, std::move(ranges));
}

void ExchangeEngine::check_newest(std::int64_t sync_round, std::size_t tensor) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    const std::int64_t begun = at(tensor).rounds.compressed();
    if (begun != sync_round)
        refuse_round(sync_round, tensor, "is not the newest that was begun, which is " + std::to_string(begun));
}

bool ExchangeEngine::await_snapshot(std::span<const std::size_t> tensors, std::int64_t sync_round,
                                    Clock::time_point until) {
    if (!await(tensors, sync_round, until)) return false;
    for (const std::size_t tensor : tensors) {
        Tensor& t = at(tensor);
        const std::lock_guard<std::mutex> residual_lock(t.residual_mutex);
        const std::lock_guard<std::mutex> lock(t.weights_mutex);
        if (!t.snapshot.is_of(sync_round)) refuse_round(sync_round, tensor, "was not asked for: there is no snapshot of it");
        t.snapshot.capture();
        if (t.residual_snapshot.is_of(sync_round)) t.residual_snapshot.finish();
    }
    return true;
}

}  // namespace atoll_kernels
