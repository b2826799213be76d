#pragma once

#include <cstddef>
#include <cstdint>

#include "../cpu/select/compress.hpp"
#include "device.cuh"

// Chooses units by their keys, in ascending order and without atomics, so that the same input gives the same output:
// count what each tile has, sum the counts up to each tile, write each index to its place. A key is the bits of a score
// or magnitude, which order like the numbers they stand for when no sign is set; 0 stands for "never".
namespace atoll_kernels {

constexpr std::size_t tile_units = 1024;  // what one warp goes through
constexpr unsigned warps = block_threads / warp_lanes;
constexpr unsigned offset_threads = 1024;

inline std::size_t tile_count(std::size_t units) { return (units + tile_units - 1) / tile_units; }

struct Counts {
    std::uint64_t above, equal;
};

// Chosen are all units whose key is above `key`, and the first `ties` of those that equal it.
struct Cutoff {
    std::uint32_t key;
    std::uint64_t ties;
};

// The state that the kernels of one selection pass to each other, and the host at the end.
struct Progress {
    Cutoff cutoff;
    Counts total;
    std::uint64_t nonfinite;
    std::uint64_t nonzero;  // from here on for radix select
    std::uint64_t left;
    std::uint32_t prefix;
    bool decided;
};

__device__ inline std::uint64_t smaller(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }

__device__ inline std::uint64_t chosen_count(const Progress& progress) {
    return progress.total.above + smaller(progress.total.equal, progress.cutoff.ties);
}

struct BlockKeys {
    const float* scores;  // -1: not finite
    __device__ std::uint32_t operator()(std::size_t block) const {
        return scores[block] > 0 ? __float_as_uint(scores[block]) : 0;
    }
};

// A warp's view of 32 keys: bit k stands for lane k.
struct Flags {
    unsigned above, equal;
};

template <typename Keys>
__device__ Flags flags_at(const Keys& keys, std::size_t i, std::size_t count, const Cutoff& cutoff) {
    const std::uint32_t key = i < count ? keys(i) : 0;
    return {__ballot_sync(all_lanes, i < count && key > cutoff.key),
            __ballot_sync(all_lanes, i < count && key == cutoff.key)};
}

// counts[t] = how many keys of tile t lie above progress->cutoff, and how many equal it.
//   keys: of `count` units; counts: [tiles], device, overwritten
// Bound by memory: reads each key's source once, and writes 16 bytes a tile.
template <typename Keys>
__global__ void count_tiles(Keys keys, std::size_t count, const Progress* progress, Counts* counts, std::size_t tiles) {
    const unsigned lane = threadIdx.x % warp_lanes;
    for (std::size_t tile = std::size_t{blockIdx.x} * warps + threadIdx.x / warp_lanes; tile < tiles;
         tile += std::size_t{gridDim.x} * warps) {
        Counts mine{0, 0};
        for (std::size_t at = 0; at < tile_units; at += warp_lanes) {
            const Flags flags = flags_at(keys, tile * tile_units + at + lane, count, progress->cutoff);
            mine.above += __popc(flags.above);
            mine.equal += __popc(flags.equal);
        }
        if (lane == 0) counts[tile] = mine;
    }
}

// index[place] = i for every chosen unit i, ascending; places from `capacity` on are left out.
//   before: [tiles], of the tiles before each, from sum_before; index: uint32 [capacity], device
// Bound by memory: reads each key's source once, and writes 4 bytes a chosen unit.
template <typename Keys>
__global__ void place_indices(Keys keys, std::size_t count, const Progress* progress, const Counts* before,
                              std::size_t tiles, std::uint32_t* index, std::size_t capacity) {
    const unsigned lane = threadIdx.x % warp_lanes;
    const unsigned lanes_below = (1U << lane) - 1;
    const Cutoff cutoff = progress->cutoff;
    for (std::size_t tile = std::size_t{blockIdx.x} * warps + threadIdx.x / warp_lanes; tile < tiles;
         tile += std::size_t{gridDim.x} * warps) {
        Counts passed = before[tile];
        for (std::size_t at = 0; at < tile_units; at += warp_lanes) {
            const std::size_t i = tile * tile_units + at + lane;
            const Flags flags = flags_at(keys, i, count, cutoff);
            const std::uint64_t ties = passed.equal + __popc(flags.equal & lanes_below);
            const bool tie = (flags.equal >> lane & 1) != 0 && ties < cutoff.ties;
            const std::uint64_t place = passed.above + __popc(flags.above & lanes_below) + smaller(ties, cutoff.ties);
            if (((flags.above >> lane & 1) != 0 || tie) && place < capacity)
                index[place] = static_cast<std::uint32_t>(i);
            passed.above += __popc(flags.above);
            passed.equal += __popc(flags.equal);
        }
    }
}

// Queues the kernel sum_before.
void queue_sum_before(Counts* counts, std::size_t tiles, Progress* progress, cudaStream_t stream);

// Writes the indices of what progress->cutoff chooses to `to`, as many as there is room for, and progress->total.
template <typename Keys>
void choose(const Keys& keys, std::size_t count, Progress* progress, const Chosen& to, int device,
            cudaStream_t stream) {
    const std::size_t tiles = tile_count(count);
    const Scratch<Counts> counts(tiles, device, stream);
    const unsigned blocks = blocks_for(tiles, warps);
    launch("starting count_tiles", count_tiles<Keys>, blocks, block_threads, stream, keys, count, progress,
           counts.get(), tiles);
    queue_sum_before(counts.get(), tiles, progress, stream);
    launch("starting place_indices", place_indices<Keys>, blocks, block_threads, stream, keys, count, progress,
           counts.get(), tiles, to.index, to.capacity);
}

}  // namespace atoll_kernels
