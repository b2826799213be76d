#include "compress.hpp"

#include <algorithm>
#include <bit>

#include "../cpu/select/random_blocks.hpp"
#include "scan.cuh"

namespace atoll_kernels {
namespace {

// Sets the state that a selection begins with: progress [1], device. One thread, bound by latency.
__global__ void begin(Progress* progress, Cutoff cutoff) {
    *progress = Progress{};
    progress->cutoff = cutoff;
}

// index[k] = the k-th of random_blocks(seed, blocks, count).   index: uint32 [count], device
// Bound by memory: writes 4 bytes an index. Twin: random_blocks.
__global__ void fill_random(std::uint64_t seed, std::size_t blocks, std::size_t count, std::uint32_t* index) {
    for (std::size_t k = std::size_t{blockIdx.x} * block_threads + threadIdx.x; k < count;
         k += std::size_t{gridDim.x} * block_threads) {
        index[k] = random_block_of_interval(seed, k, blocks, count);
    }
}

// sums[16 k + i] = v of entry i of the k-th sampled block, 0 beyond the end: the blocks as a tensor of their own.
//   blocks: uint32 [count]; sums: float32 [16 count], both device
// Bound by memory latency: reads 64 bytes (128 with a residual) in one place and writes 64 a block.
__global__ void copy_sample(Source from, const std::uint32_t* blocks, std::size_t count, float* sums) {
    for (std::size_t at = std::size_t{blockIdx.x} * block_threads + threadIdx.x; at < count * block_entries;
         at += std::size_t{gridDim.x} * block_threads) {
        const std::size_t i = std::size_t{blocks[at / block_entries]} * block_entries + at % block_entries;
        float sum = i < from.n ? from.weight * from.gradient[i] : 0.0F;
        if (from.residual != nullptr && i < from.n) sum = from.residual[i] + sum;
        sums[at] = sum;
    }
}

cudaStream_t stream_of(const Queue& queue) { return static_cast<cudaStream_t>(queue.stream); }

std::uint32_t key_of(float threshold) { return std::bit_cast<std::uint32_t>(threshold) & 0x7fffffff; }

Selection result(const Progress& progress, std::size_t capacity) {
    const std::size_t found = progress.total.above;
    return {std::min(found, capacity), found, progress.nonfinite};
}

}  // namespace

Selection threshold_block_cuda(const Source& from, float threshold, const Chosen& to, const Queue& queue) {
    if (from.n == 0) return {0, 0, 0};
    const OnDevice on_device(queue.device);
    const cudaStream_t stream = stream_of(queue);
    const std::size_t blocks = block_count(from.n);
    const Scratch<float> scores(blocks, queue.device, stream);
    const Scratch<Progress> progress(1, queue.device, stream);
    launch("starting begin", begin, 1, 1, stream, progress.get(), Cutoff{key_of(threshold), 0});
    queue_scan(from, scores.get(), progress.get(), stream);
    choose(BlockKeys{scores.get()}, blocks, progress.get(), to, queue.device, stream);
    queue_take_blocks(from, nullptr, to, progress.get(), stream);
    return result(read_back(progress.get(), stream), to.capacity);
}

void random_blocks_cuda(std::uint64_t seed, std::size_t blocks, std::size_t count, std::uint32_t* index,
                        const Queue& queue) {
    if (count == 0) return;
    const OnDevice on_device(queue.device);
    launch("starting fill_random", fill_random, blocks_for(count, block_threads), block_threads, stream_of(queue), seed,
           blocks, count, index);
}

Selection random_block_cuda(const Source& from, std::uint64_t seed, const Chosen& to, const Queue& queue) {
    if (from.n == 0) return {0, 0, 0};
    const OnDevice on_device(queue.device);
    const cudaStream_t stream = stream_of(queue);
    const std::size_t blocks = block_count(from.n), chosen = std::min(blocks, to.capacity);
    const Scratch<float> scores(blocks, queue.device, stream);
    const Scratch<Progress> progress(1, queue.device, stream);
    launch("starting begin", begin, 1, 1, stream, progress.get(), Cutoff{0, 0});
    random_blocks_cuda(seed, blocks, chosen, to.index, queue);
    queue_scan(from, scores.get(), progress.get(), stream);
    queue_take_blocks(from, scores.get(), {to.index, to.values, chosen}, nullptr, stream);
    return {chosen, chosen, read_back(progress.get(), stream).nonfinite};
}

void sample_scores_cuda(const Source& from, std::uint64_t seed, std::size_t count, float* scores, const Queue& queue) {
    if (count == 0) return;
    const OnDevice on_device(queue.device);
    const cudaStream_t stream = stream_of(queue);
    const Scratch<std::uint32_t> blocks(count, queue.device, stream);
    const Scratch<float> sums(count * block_entries, queue.device, stream);
    const Scratch<Progress> progress(1, queue.device, stream);
    launch("starting begin", begin, 1, 1, stream, progress.get(), Cutoff{0, 0});
    random_blocks_cuda(seed, block_count(from.n), count, blocks.get(), queue);
    launch("starting copy_sample", copy_sample, blocks_for(count * block_entries, block_threads), block_threads, stream,
           from, blocks.get(), count, sums.get());
    queue_scan({sums.get(), nullptr, 1.0F, count * block_entries}, scores, progress.get(), stream);
}

}  // namespace atoll_kernels
