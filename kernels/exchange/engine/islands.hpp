#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace atoll_kernels {

// The islands as one rank sees them.
struct Islands {
    int rank;
    std::vector<std::vector<int>> members;  // of each island that exchange, ascending; the first is its leader
    std::size_t mine;                       // the island that `rank` is of
    std::size_t place;                      // of `rank` in it

    const std::vector<int>& mates() const { return members[mine]; }  // with `rank` itself
    bool alone() const { return mates().size() == 1; }
    bool single() const { return members.size() == 1; }
    bool leads() const { return place == 0; }
    bool follows() const { return place >= mates().size(); }  // the leader exchanges for it
};

// leaders_only: an island is one replica, and its leader exchanges for all of it. Throws std::invalid_argument unless
// `members` holds 0..N-1, each once, and `rank` is one of them.
Islands checked_islands(int rank, std::vector<std::vector<int>> members, bool leaders_only);

}  // namespace atoll_kernels
