#include "scatter.hpp"

#include "device.cuh"

namespace atoll_kernels {
namespace {

__device__ void write_live(const Live& live, std::size_t i, float p) {
    switch (live.format) {
        case ValueFormat::float32: static_cast<float*>(live.data)[i] = p; break;
        case ValueFormat::float16: static_cast<std::uint16_t*>(live.data)[i] = to_float16(p); break;
        case ValueFormat::bfloat16: static_cast<std::uint16_t*>(live.data)[i] = to_bfloat16(p); break;
    }
}

// live[16 index[k] + i] = values[16 k + i], rounded to live's format; entries from n on are left out.
// Bound by memory latency: reads 68 and writes 64 bytes (32 in 16 bits) a block, at scattered places.
__global__ void scatter(Live live, std::size_t n, Units update) {
    for (std::size_t at = std::size_t{blockIdx.x} * block_threads + threadIdx.x; at < update.count * block_entries;
         at += std::size_t{gridDim.x} * block_threads) {
        const std::size_t i = std::size_t{update.index[at / block_entries]} * block_entries + at % block_entries;
        if (i < n) write_live(live, i, update.values[at]);
    }
}

}  // namespace

void scatter_blocks_cuda(const Live& live, std::size_t n, const Units& update, const Queue& queue) {
    if (update.count == 0) return;
    const OnDevice on_device(queue.device);
    launch("starting scatter", scatter, blocks_for(update.count * block_entries, block_threads), block_threads,
           static_cast<cudaStream_t>(queue.stream), live, n, update);
}

}  // namespace atoll_kernels
