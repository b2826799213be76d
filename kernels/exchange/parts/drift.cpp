#include "drift.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "../../cpu/select/random_blocks.hpp"

namespace atoll_kernels {
namespace {

double squares(const std::vector<float>& values) {
    double sum = 0;
    for (const float value : values) sum += std::isfinite(value) ? static_cast<double>(value) * value : 0;
    return sum;
}

}  // namespace

Drift::Drift(std::size_t entries)
    : blocks_(block_count(entries)),
      index_(std::min(blocks_, sampled_blocks)),
      outstanding_(index_.size() * block_entries),
      before_(index_.size() * block_entries) {
    random_blocks(entries, blocks_, index_.size(), index_.data());
}

void Drift::before(const Difference& of) {
    for (std::size_t k = 0; k < index_.size(); ++k)
        difference_of_block(of, index_[k], before_.data() + k * block_entries);
}

DriftSquares Drift::after(const Units& sent) {
    for (std::size_t i = 0; i < before_.size(); ++i) outstanding_[i] = before_[i] - outstanding_[i];
    const double update = squares(outstanding_);
    outstanding_.swap(before_);
    std::size_t at = 0;
    for (std::size_t k = 0; k < index_.size(); ++k) {
        while (at < sent.count && sent.index[at] < index_[k]) ++at;
        if (at == sent.count || sent.index[at] != index_[k]) continue;
        for (std::size_t i = 0; i < block_entries; ++i)
            outstanding_[k * block_entries + i] -= sent.values[at * block_entries + i];
    }
    if (!std::exchange(known_, true)) return {};
    const double of_all = static_cast<double>(blocks_) / static_cast<double>(std::max<std::size_t>(index_.size(), 1));
    return {of_all * squares(outstanding_), of_all * update};
}

}  // namespace atoll_kernels
