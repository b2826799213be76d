#pragma once

#include <cstddef>
#include <stdexcept>

#include "../cpu/reduce/weighted_sum.hpp"

// The CUDA twins of kernels/cpu. Pointers are to the memory of device `device`; `stream` is a cudaStream_t of it.
namespace atoll_kernels {

class CudaError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// 0 without a driver, without a device, or if the driver is too old for this build.
int cuda_device_count();

// As squared_norm: float64 products and sums. The order of additions is fixed by n alone, but is not the CPU's: the last
// bits may differ. Waits for the result. Bound by memory (by float64 arithmetic on consumer cards): reads 4n bytes.
double squared_norm_cuda(const float* x, std::size_t n, int device, void* stream);

// As weighted_sum, with the same bits. Returns when the work is queued. Bound by memory: reads 4n bytes a input, writes 4n.
void weighted_sum_cuda(float* out, std::size_t n, const WeightedInput* inputs, std::size_t count, int device, void* stream);

}  // namespace atoll_kernels
