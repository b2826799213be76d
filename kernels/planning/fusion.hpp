#pragma once

#include <cstddef>
#include <vector>

#include "timeline.hpp"

namespace atoll_kernels {

// Seconds for x bytes: alpha + beta * max(x, floor_bytes).
struct Cost {
    double alpha, beta, floor_bytes;
    double operator()(double bytes) const { return alpha + beta * (bytes < floor_bytes ? floor_bytes : bytes); }
};

struct Fused {
    std::vector<std::size_t> ends;  // of each group, the tensor after its last
    double end_s;
};

// The groups of consecutive tensors, each compressed at once on the device of the backward pass and sent at once, with
// which everything ends soonest. Exact.
//
// What a prefix of groups leaves behind is when computing and when sending end; only the pairs that no other beats in
// both are worth extending. O(N^2 L), L the pairs a prefix has at most (few).
// Source: Cupcake (Wang, 2023), Section 5.3, for the costs; the search is ours.
Fused fuse(const std::vector<TensorWork>& tensors, const Cost& compress, const Cost& communicate);

}  // namespace atoll_kernels
