#include "snapshot.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../../cpu/select/compress.hpp"

namespace atoll_kernels {

void StateSnapshot::capture() {
    for (const SnapshotRange& range : std::exchange(ranges_, {})) std::memcpy(range.to, range.from, range.bytes);
}

void ResidualSnapshot::capture() {
    if (residual_ != nullptr) std::copy_n(std::exchange(residual_, nullptr), entries_, out_);
}

void ResidualSnapshot::add(const Units& lost) {
    for (std::size_t k = 0; k < lost.count; ++k) {
        const std::size_t begin = lost.index[k] * block_entries, end = std::min(entries_, begin + block_entries);
        for (std::size_t i = begin; i < end; ++i) out_[i] += lost.values[k * block_entries + i - begin];
    }
}

}  // namespace atoll_kernels
