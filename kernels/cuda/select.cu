#include "select.cuh"

#include "block_scan.cuh"

namespace atoll_kernels {
namespace {

// Replaces the counts by their exclusive sums, and sets progress->total; one block, each thread with a run of
// neighbouring tiles.
//   counts: [tiles], device, updated in place
// Bound by latency: one block reads 32 and writes 16 bytes a tile of 1024 units.
__global__ void sum_before(Counts* counts, std::size_t tiles, Progress* progress) {
    const std::size_t run = (tiles + offset_threads - 1) / offset_threads;
    const std::size_t begin = smaller(tiles, threadIdx.x * run), end = smaller(tiles, begin + run);
    Counts mine{0, 0};
    for (std::size_t tile = begin; tile < end; ++tile) {
        mine.above += counts[tile].above;
        mine.equal += counts[tile].equal;
    }
    Counts total;
    Counts before{sum_before_me<offset_threads>(mine.above, total.above), 0};
    before.equal = sum_before_me<offset_threads>(mine.equal, total.equal);
    for (std::size_t tile = begin; tile < end; ++tile) {
        const Counts here = counts[tile];
        counts[tile] = before;
        before.above += here.above;
        before.equal += here.equal;
    }
    if (threadIdx.x == 0) progress->total = total;
}

}  // namespace

void queue_sum_before(Counts* counts, std::size_t tiles, Progress* progress, cudaStream_t stream) {
    launch("starting sum_before", sum_before, 1, offset_threads, stream, counts, tiles, progress);
}

}  // namespace atoll_kernels
