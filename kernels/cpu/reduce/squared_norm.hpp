#pragma once

#include <cstddef>

#include "../processor/features.hpp"

namespace atoll_kernels {

// Sum of x[i]^2 in float64.
//   x: float32 [n], any alignment, n = 0 allowed (then 0). NaN gives NaN; an infinity gives infinity.
// Products of two float32 are exact in float64 and the order of additions is fixed by n alone, so the result has
// the same bits for every number of threads and on every processor.
// Bound by memory: reads 4n bytes.
double squared_norm(const float* x, std::size_t n, int threads, Path path);

}  // namespace atoll_kernels
