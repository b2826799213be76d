#include "kept.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "pipeline.hpp"

namespace atoll_kernels {

void KeptRanges::copy() {
    for (const KeptRange& range : std::exchange(ranges_, {})) std::memcpy(range.to, range.from, range.bytes);
}

void KeptOwed::copy() {
    if (residual_ != nullptr) std::copy_n(std::exchange(residual_, nullptr), entries_, out_);
}

void KeptOwed::add(const Units& lost) {
    for (std::size_t k = 0; k < lost.count; ++k) {
        const std::size_t begin = lost.index[k] * block_entries, end = std::min(entries_, begin + block_entries);
        for (std::size_t i = begin; i < end; ++i) out_[i] += lost.values[k * block_entries + i - begin];
    }
}

void Pipeline::keep(std::int64_t step, std::size_t tensor, std::vector<KeptRange> ranges) {
    {
        const std::lock_guard<std::mutex> lock(books_);
        check_open();
    }
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.updating);
    if (t.weights_version > step) {
        throw std::invalid_argument("step = " + std::to_string(step) + " of tensor " + std::to_string(tensor) +
                                    " is gone: its weights are of step " + std::to_string(t.weights_version));
    }
    t.kept = KeptRanges(step, std::move(ranges));
}

std::size_t Pipeline::keep_owed(std::int64_t step, std::size_t tensor, const Live& live, float* out,
                                std::shared_ptr<const void> out_owner) {
    {
        const std::lock_guard<std::mutex> lock(books_);
        check_open();
        const std::int64_t begun = at(tensor).ledger.compressed();
        if (begun != step) {
            throw std::invalid_argument("step = " + std::to_string(step) + " of tensor " + std::to_string(tensor) +
                                        " is not the newest that was begun, which is " + std::to_string(begun));
        }
    }
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.owed);
    const std::size_t nonfinite = settings_.updates ? owed(tensor, live, out) : 0;
    t.kept_owed = KeptOwed(step, settings_.updates ? nullptr : t.residual, out, t.weights.entries(), std::move(out_owner));
    return nonfinite;
}

bool Pipeline::take_kept(std::size_t tensor, std::int64_t step, Clock::time_point until) {
    const std::size_t tensors[] = {tensor};
    if (!await(tensors, step, until)) return false;
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> owed_lock(t.owed);
    const std::lock_guard<std::mutex> lock(t.updating);
    if (!t.kept.is_of(step))
        throw std::invalid_argument("nothing of step " + std::to_string(step) + " of tensor " + std::to_string(tensor) +
                                    " is kept");
    t.kept.copy();
    if (t.kept_owed.is_of(step)) t.kept_owed.finish();
    return true;
}

}  // namespace atoll_kernels
