// Exact top-k: the k-th largest key by counting three digits (radix select on the bits of a float32), then the same
// writing of indices as for a threshold.
#include "block_scan.cuh"
#include "compress.hpp"
#include "scan.cuh"

namespace atoll_kernels {
namespace {

constexpr int digits = 3;
constexpr int bits_per_digit[digits] = {11, 10, 10};
constexpr unsigned bins = 1U << 11;
constexpr unsigned choosing_threads = bins / 2;

struct Digit {
    int known;  // bits from here up are those of progress->prefix
    int shift;
    int width;
};

// Sets the state that a top-k of k units begins with.   counts: uint64 [bins], device. One block, bound by latency.
__global__ void begin_top_k(Progress* progress, std::uint64_t* counts, std::uint64_t k) {
    for (unsigned bin = threadIdx.x; bin < bins; bin += blockDim.x) counts[bin] = 0;
    if (threadIdx.x != 0) return;
    *progress = Progress{};
    progress->left = k;
}

// Adds to counts[b] how many keys with the known prefix have b for their next bits. Zeros are never counted.
//   keys: of `count` units; counts: uint64 [bins], device
// Bound by memory: reads each key's source once. Integers, so any order of additions gives the same counts.
template <typename Keys>
__global__ void count_bins(Keys keys, std::size_t count, Digit digit, const Progress* progress, std::uint64_t* counts) {
    __shared__ unsigned mine[bins];
    if (progress->decided) return;
    for (unsigned bin = threadIdx.x; bin < bins; bin += block_threads) mine[bin] = 0;
    __syncthreads();
    const std::uint32_t prefix = progress->prefix;
    for (std::size_t i = std::size_t{blockIdx.x} * block_threads + threadIdx.x; i < count;
         i += std::size_t{gridDim.x} * block_threads) {
        const std::uint32_t key = keys(i);
        if (key != 0 && key >> digit.known == prefix)
            atomicAdd(&mine[key >> digit.shift & ((1U << digit.width) - 1)], 1U);
    }
    __syncthreads();
    for (unsigned bin = threadIdx.x; bin < bins; bin += block_threads) {
        if (mine[bin] != 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(&counts[bin]), static_cast<unsigned long long>(mine[bin]));
    }
}

// Finds the bin that holds the k-th largest key, and clears the counts; one block, each thread with two bins, from the
// highest down. Bound by latency: reads and writes 16 KiB.
__global__ void choose_bin(Digit digit, Progress* progress, std::uint64_t* counts) {
    if (progress->decided) return;
    const unsigned high = bins - 1 - 2 * threadIdx.x, low = high - 1;
    const std::uint64_t in_high = counts[high], in_low = counts[low];
    const std::uint64_t left = progress->left;
    counts[high] = counts[low] = 0;
    std::uint64_t total = 0;
    const std::uint64_t before = sum_before_me<choosing_threads>(in_high + in_low, total);
    __syncthreads();  // everyone has read progress: now one thread may write it
    if (digit.shift + digit.width == 31) {
        if (threadIdx.x == 0) progress->nonzero = total;
        if (total <= left) {  // fewer than k are there: all are chosen
            if (threadIdx.x == 0) progress->decided = true;
            return;
        }
    }
    if (before >= left || before + in_high + in_low < left) return;
    const bool in_first = before + in_high >= left;
    progress->left = left - before - (in_first ? 0 : in_high);
    progress->prefix = progress->prefix << digit.width | (in_first ? high : low);
    if (digit.shift == 0) progress->cutoff = {progress->prefix, progress->left};
}

template <typename Keys>
void find_cutoff(const Keys& keys, std::size_t count, Progress* progress, std::uint64_t* counts, cudaStream_t stream) {
    Digit digit{31, 31, 0};
    for (const int width : bits_per_digit) {
        digit = {digit.shift, digit.shift - width, width};
        launch("starting count_bins", count_bins<Keys>, blocks_for(count, block_threads * 16), block_threads, stream,
               keys, count, digit, progress, counts);
        launch("starting choose_bin", choose_bin, 1, choosing_threads, stream, digit, progress, counts);
    }
}

Selection result(const Progress& progress) {
    return {progress.total.above + std::min(progress.total.equal, progress.cutoff.ties), progress.nonzero,
            progress.nonfinite};
}

}  // namespace

Selection topk_block_cuda(const Source& from, const Chosen& to, const Queue& queue) {
    if (from.n == 0) return {0, 0, 0};
    const OnDevice on_device(queue.device);
    const auto stream = static_cast<cudaStream_t>(queue.stream);
    const std::size_t blocks = block_count(from.n);
    const Scratch<float> scores(blocks, queue.device, stream);
    const Scratch<std::uint64_t> counts(bins, queue.device, stream);
    const Scratch<Progress> progress(1, queue.device, stream);
    launch("starting begin_top_k", begin_top_k, 1, block_threads, stream, progress.get(), counts.get(), to.capacity);
    queue_scan(from, scores.get(), progress.get(), stream);
    if (to.capacity == 0) return {0, 0, read_back(progress.get(), stream).nonfinite};
    const BlockKeys keys{scores.get()};
    find_cutoff(keys, blocks, progress.get(), counts.get(), stream);
    choose(keys, blocks, progress.get(), to, queue.device, stream);
    queue_take_blocks(from, nullptr, to, progress.get(), stream);
    return result(read_back(progress.get(), stream));
}

}  // namespace atoll_kernels
