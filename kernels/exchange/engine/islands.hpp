#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace atoll_kernels {

// The islands as one rank sees them.
struct Islands {
    int rank;
    std::vector<std::vector<int>> members;  // of each island, ascending; the first is its leader
    std::size_t mine;                       // the island that `rank` is of
    std::size_t place;                      // of `rank` in it

    const std::vector<int>& mates() const { return members[mine]; }  // with `rank` itself
    bool alone() const { return mates().size() == 1; }
    bool single() const { return members.size() == 1; }
    bool leads() const { return place == 0; }
};

// Throws std::invalid_argument unless `members` holds 0..N-1, each once, and `rank` is one of them.
Islands checked_islands(int rank, std::vector<std::vector<int>> members);

}  // namespace atoll_kernels
