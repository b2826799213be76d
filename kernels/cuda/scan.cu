#include "scan.cuh"

#include <cfloat>

namespace atoll_kernels {
namespace {

// Four lanes read one block, each a quarter of it: a warp's accesses lie side by side, 16 bytes a lane.
constexpr unsigned quarter_entries = 4;
constexpr unsigned lanes_per_block = block_entries / quarter_entries;
constexpr unsigned quarters_at_once = 4;  // per thread, loaded before the first is used, which hides latency

struct Quarter {
    float x[quarter_entries];
};

bool aligned_16(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// Entries from n on are 0.
__device__ Quarter load(const float* from, std::size_t begin, std::size_t n, bool aligned) {
    Quarter q{};
    if (aligned && begin + quarter_entries <= n) {
        const float4 all = *reinterpret_cast<const float4*>(from + begin);
        return {{all.x, all.y, all.z, all.w}};
    }
    for (unsigned i = 0; i < quarter_entries; ++i) {
        if (begin + i < n) q.x[i] = from[begin + i];
    }
    return q;
}

__device__ void store(float* to, std::size_t begin, std::size_t n, bool aligned, const Quarter& q) {
    if (aligned && begin + quarter_entries <= n) {
        *reinterpret_cast<float4*>(to + begin) = make_float4(q.x[0], q.x[1], q.x[2], q.x[3]);
        return;
    }
    for (unsigned i = 0; i < quarter_entries; ++i) {
        if (begin + i < n) to[begin + i] = q.x[i];
    }
}

__device__ Quarter sum_of(const Quarter& gradient, const Quarter& residual, float weight, bool feedback) {
    Quarter sum;
    for (unsigned i = 0; i < quarter_entries; ++i) {
        sum.x[i] = weight * gradient.x[i];
        if (feedback) sum.x[i] = residual.x[i] + sum.x[i];
    }
    return sum;
}

// The sum of a block's magnitudes in the CPU's order of additions: 8 apart, 4 apart, 2 apart, neighbours.
__device__ float score_of(const Quarter& mine) {
    float folded[quarter_entries];
    for (unsigned i = 0; i < quarter_entries; ++i) {
        const float magnitude = fabsf(mine.x[i]);
        folded[i] = magnitude + __shfl_xor_sync(all_lanes, magnitude, 2);
    }
    for (unsigned i = 0; i < quarter_entries; ++i) folded[i] += __shfl_xor_sync(all_lanes, folded[i], 1);
    return (folded[0] + folded[2]) + (folded[1] + folded[3]);
}

__device__ void add_to(std::uint64_t* total, unsigned mine) {
    if (mine != 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(mine));
}

// residual += weight * gradient in blocks that are finite; scores[b] = score of block b, -1 if it is not finite; adds
// how many are not to progress->nonfinite.
//   gradient, residual (may be null): float32 [n], device; aligned: both to 16 bytes; scores: float32 [ceil(n / 16)]
// Bound by memory: reads 8n, writes 4.25n bytes with a residual; reads 4n, writes 0.25n without.
__global__ void scan_blocks(Source from, float* scores, Progress* progress, bool aligned) {
    const bool feedback = from.residual != nullptr;
    const std::size_t quarters = (from.n + block_entries - 1) / block_entries * lanes_per_block;
    const std::size_t per_turn = std::size_t{block_threads} * quarters_at_once;
    unsigned nonfinite = 0;
    for (std::size_t turn = blockIdx.x * per_turn; turn < quarters; turn += gridDim.x * per_turn) {
        Quarter gradient[quarters_at_once], residual[quarters_at_once];
#pragma unroll
        for (unsigned u = 0; u < quarters_at_once; ++u) {
            const std::size_t begin = (turn + u * block_threads + threadIdx.x) * quarter_entries;
            gradient[u] = load(from.gradient, begin, from.n, aligned);
            residual[u] = feedback ? load(from.residual, begin, from.n, aligned) : Quarter{};
        }
#pragma unroll
        for (unsigned u = 0; u < quarters_at_once; ++u) {
            const std::size_t quarter = turn + u * block_threads + threadIdx.x;
            const Quarter sum = sum_of(gradient[u], residual[u], from.weight, feedback);
            const float score = score_of(sum);
            const bool finite = score <= FLT_MAX;
            if (feedback && finite) store(from.residual, quarter * quarter_entries, from.n, aligned, sum);
            if (quarter % lanes_per_block == 0 && quarter < quarters) {
                scores[quarter / lanes_per_block] = finite ? score : -1.0F;
                nonfinite += !finite;
            }
        }
    }
    add_to(&progress->nonfinite, nonfinite);
}

__device__ std::size_t taken(const Chosen& to, const Progress* progress) {
    return progress == nullptr ? to.capacity : smaller(to.capacity, chosen_count(*progress));
}

__device__ float take(const Source& from, std::size_t i) {
    if (from.residual == nullptr) return from.weight * from.gradient[i];
    const float value = from.residual[i];
    from.residual[i] = 0.0F;
    return value;
}

// values[16 k + i] = v of entry i of block index[k], which becomes 0 in the residual; zeros beyond the end, and where
// scores (may be null) says that the block is not finite.
// Bound by memory latency: reads 64 and writes 128 bytes a chosen block (64 without a residual), at scattered places.
__global__ void take_blocks(Source from, const float* scores, Chosen to, const Progress* progress) {
    const std::size_t values = taken(to, progress) * block_entries;
    for (std::size_t at = std::size_t{blockIdx.x} * block_threads + threadIdx.x; at < values;
         at += std::size_t{gridDim.x} * block_threads) {
        const std::size_t block = to.index[at / block_entries];
        const std::size_t i = block * block_entries + at % block_entries;
        const bool given = i < from.n && (scores == nullptr || scores[block] >= 0);
        to.values[at] = given ? take(from, i) : 0.0F;
    }
}

}  // namespace

void queue_scan(const Source& from, float* scores, Progress* progress, cudaStream_t stream) {
    const std::size_t quarters = block_count(from.n) * lanes_per_block;
    const bool aligned = aligned_16(from.gradient) && aligned_16(from.residual);
    launch("starting scan_blocks", scan_blocks, blocks_for(quarters, block_threads * quarters_at_once), block_threads,
           stream, from, scores, progress, aligned);
}

void queue_take_blocks(const Source& from, const float* scores, const Chosen& to, const Progress* progress,
                       cudaStream_t stream) {
    launch("starting take_blocks", take_blocks, blocks_for(to.capacity * block_entries, block_threads), block_threads,
           stream, from, scores, to, progress);
}

}  // namespace atoll_kernels
