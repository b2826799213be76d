#include "reduce.hpp"

#include <algorithm>
#include <cstdint>

#include "device.cuh"

namespace atoll_kernels {
namespace {

constexpr std::size_t chunk_entries = std::size_t{1} << 16;  // one partial sum; fixes the order of additions

// Sum over the block in a fixed order; the result is in thread 0.
__device__ double sum_over_block(double mine) {
    __shared__ double sums[block_threads];
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned half = block_threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

// partial[c] = sum of squares of chunk c, in float64.
//   x: float32 [n]; partial: float64 [chunks], chunks = ceil(n / chunk_entries), device, overwritten
// Bound by memory: reads 4n bytes (by float64 arithmetic on consumer cards).
__global__ void square_chunks(const float* x, std::uint64_t n, double* partial, std::uint64_t chunks) {
    for (std::uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const std::uint64_t begin = chunk * chunk_entries;
        const std::uint64_t end = begin + chunk_entries < n ? begin + chunk_entries : n;
        double mine = 0;
        for (std::uint64_t i = begin + threadIdx.x; i < end; i += block_threads) {
            const double value = x[i];
            mine += value * value;
        }
        const double sum = sum_over_block(mine);
        if (threadIdx.x == 0) partial[chunk] = sum;
        __syncthreads();  // the next chunk uses the shared sums again
    }
}

// total[0] = sum of partial [chunks], by one block in a fixed order. Bound by latency: reads 8 bytes a chunk.
__global__ void sum_partials(const double* partial, std::uint64_t chunks, double* total) {
    double mine = 0;
    for (std::uint64_t i = threadIdx.x; i < chunks; i += block_threads) mine += partial[i];
    const double sum = sum_over_block(mine);
    if (threadIdx.x == 0) total[0] = sum;
}

struct WeightedInputs {  // a kernel's parameters: by value, at most 4 KiB
    WeightedInput at[max_inputs];
    unsigned count;
};
static_assert(sizeof(WeightedInputs) <= 4096);

// out[i] = inputs[0].weight * inputs[0].x[i] + ..., each product and sum rounded: no fused multiply-add.
//   out, inputs[k].x: float32 [n], device; an x may be out itself; 0 inputs set out to 0
// Bound by memory: reads 4n bytes an input, writes 4n. Twin: weighted_sum; the same bits.
__global__ void add_inputs(float* out, std::uint64_t n, const __grid_constant__ WeightedInputs inputs) {
    const std::uint64_t stride = std::uint64_t{gridDim.x} * block_threads;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * block_threads + threadIdx.x; i < n; i += stride) {
        float sum = inputs.count == 0 ? 0.0F : __fmul_rn(inputs.at[0].weight, inputs.at[0].x[i]);
        for (unsigned k = 1; k < inputs.count; ++k)
            sum = __fadd_rn(sum, __fmul_rn(inputs.at[k].weight, inputs.at[k].x[i]));
        out[i] = sum;
    }
}

}  // namespace

double squared_norm_cuda(const float* x, std::size_t n, int device, void* stream_handle) {
    if (n == 0) return 0;
    const OnDevice on_device(device);
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const std::size_t chunks = (n + chunk_entries - 1) / chunk_entries;
    const Scratch<double> scratch(chunks + 1, device, stream);
    double* const total = scratch.get() + chunks;
    launch("starting square_chunks", square_chunks, blocks_for(chunks, 1), block_threads, stream, x, n, scratch.get(),
           chunks);
    launch("starting sum_partials", sum_partials, 1, block_threads, stream, scratch.get(), chunks, total);
    return read_back(total, stream);
}

void weighted_sum_cuda(float* out, std::size_t n, const WeightedInput* inputs, std::size_t count, int device,
                       void* stream_handle) {
    if (n == 0) return;
    const OnDevice on_device(device);
    WeightedInputs parameters{};
    std::copy_n(inputs, count, parameters.at);
    parameters.count = static_cast<unsigned>(count);
    launch("starting add_inputs", add_inputs, blocks_for(n, block_threads), block_threads,
           static_cast<cudaStream_t>(stream_handle), out, n, parameters);
}

}  // namespace atoll_kernels
