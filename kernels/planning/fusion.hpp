#pragma once

#include <cstddef>
#include <vector>

#include "timeline.hpp"

namespace atoll_kernels {

// Cost of x bytes in seconds: alpha + beta * max(x, floor_bytes).
struct Cost {
    double alpha, beta, floor_bytes;
    double operator()(double bytes) const { return alpha + beta * (bytes < floor_bytes ? floor_bytes : bytes); }
};

struct Fused {
    std::vector<std::size_t> ends;  // the tensor after each group's last
    double end_s;
};

// Returns the groups of consecutive tensors with the earliest end. Exact. A group is compressed by one call, on the
// device of the backward pass, and sent as one message.
//
// The state after a prefix of groups is the pair (end of computing, end of sending). Only pairs that no other pair
// beats in both are extended. O(N^2 L), with L the largest number of pairs of a prefix (few).
// Source: Cupcake (Wang, 2023), Section 5.3, for the costs; the search is ours.
Fused fuse(const std::vector<TensorWork>& tensors, const Cost& compress, const Cost& communicate);

}  // namespace atoll_kernels
