#include "islands.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "../../cpu/codec/block_coo.hpp"

namespace atoll_kernels {
namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument("islands " + why + "; pass the ranks 0..N-1, each once, grouped by island");
}

void check_numbers(const std::vector<std::vector<int>>& members) {
    std::vector<int> all;
    for (const std::vector<int>& island : members) {
        if (island.empty()) refuse("has one without a rank");
        if (island.size() > most_inputs) {
            refuse("has one of " + std::to_string(island.size()) + " ranks, more than the " +
                   std::to_string(most_inputs) + " of one sum");
        }
        all.insert(all.end(), island.begin(), island.end());
    }
    std::sort(all.begin(), all.end());
    for (std::size_t k = 0; k < all.size(); ++k) {
        if (all[k] != static_cast<int>(k)) refuse("lacks rank " + std::to_string(k) + " or has one twice");
    }
}

}  // namespace

Islands checked_islands(int rank, std::vector<std::vector<int>> members, bool leaders_only) {
    if (members.size() >= most_inputs) {  // one place in the sum is for what accumulation carries over
        refuse("has " + std::to_string(members.size()) + " islands, more than " + std::to_string(most_inputs - 1));
    }
    check_numbers(members);
    for (std::vector<int>& island : members) std::sort(island.begin(), island.end());
    for (std::size_t k = 0; k < members.size(); ++k) {
        const auto at = std::find(members[k].begin(), members[k].end(), rank);
        if (at == members[k].end()) continue;
        const auto place = static_cast<std::size_t>(at - members[k].begin());
        if (leaders_only) {
            for (std::vector<int>& island : members) island.resize(1);
        }
        return {rank, std::move(members), k, place};
    }
    throw std::invalid_argument("rank = " + std::to_string(rank) + " is in no island; pass one of those in islands");
}

}  // namespace atoll_kernels
