#include "snapshot.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace atoll_kernels {

void StateSnapshot::capture() {
    for (const SnapshotRange& range : std::exchange(ranges_, {})) std::memcpy(range.to, range.from, range.bytes);
}

void ResidualSnapshot::capture() {
    if (residual_ != nullptr) std::copy_n(std::exchange(residual_, nullptr), entries_, out_);
}

void ResidualSnapshot::add(const Units& lost) {
    add_to(out_, entries_, lost);
}

}  // namespace atoll_kernels
