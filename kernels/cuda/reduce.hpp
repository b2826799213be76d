#pragma once

#include <cstddef>

#include "../cpu/reduce/weighted_sum.hpp"

// The CUDA twins of kernels/cpu/reduce. Pointers are to the memory of device `device`; `stream` is one of its
// cudaStream_t.
namespace atoll_kernels {

// As squared_norm: float64 products and sums. The order of additions is fixed by n alone, but is not the CPU's: the
// last bits may differ. Waits for the result. Bound by memory (by float64 arithmetic on consumer cards): reads 4n
// bytes.
double squared_norm_cuda(const float* x, std::size_t n, int device, void* stream);

// As weighted_sum, with the same bits. Returns when the work is queued. Bound by memory: reads 4n bytes an input,
// writes 4n.
void weighted_sum_cuda(float* out, std::size_t n, const WeightedInput* inputs, std::size_t count, int device,
                       void* stream);

}  // namespace atoll_kernels
