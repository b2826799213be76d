#pragma once

#include <cstdint>

#include "device.cuh"

namespace atoll_kernels {

// For each of a block's `threads` threads: the sum of `mine` over the threads before it; total: over all. Integers, so
// the order of additions is of no matter.
template <unsigned threads>
__device__ std::uint64_t sum_before_me(std::uint64_t mine, std::uint64_t& total) {
    __shared__ std::uint64_t sums[threads];
    __syncthreads();  // those of an earlier call have been read
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned distance = 1; distance < threads; distance *= 2) {
        const std::uint64_t other = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    total = sums[threads - 1];
    return sums[threadIdx.x] - mine;
}

}  // namespace atoll_kernels
