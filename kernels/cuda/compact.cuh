#pragma once

#include <cstddef>
#include <cstdint>

#include "block_scan.cuh"

// Brings what some items give (none, one or several each) together, in the items' order: count what each tile of items
// gives, sum the counts up to each tile, and give it to its places. No atomics, so the order never changes.
namespace atoll_kernels {

constexpr std::size_t items_per_thread = 4;
constexpr std::size_t tile_items = block_threads * items_per_thread;

inline std::size_t compact_tiles(std::size_t items) { return (items + tile_items - 1) / tile_items; }

// Items has: `items`; __device__ unsigned count(std::size_t item); __device__ void give(std::size_t item, std::uint64_t
// at), which gives what the item has to the places from `at` on.
template <typename Items>
__device__ std::uint64_t count_mine(const Items& from, std::size_t tile) {
    const std::size_t begin = tile * tile_items + threadIdx.x * items_per_thread;
    std::uint64_t mine = 0;
    for (std::size_t i = begin; i < begin + items_per_thread && i < from.items; ++i) mine += from.count(i);
    return mine;
}

// before: uint64 [tiles + 1], device; before[tile] becomes what the tile has.
template <typename Items>
__global__ void count_tiles(Items from, std::uint64_t* before, std::size_t tiles) {
    for (std::size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        std::uint64_t total = 0;
        sum_before_me<block_threads>(count_mine(from, tile), total);
        if (threadIdx.x == 0) before[tile] = total;
    }
}

// before: uint64 [count + 1], device; each becomes the sum of those before it, the last that of all.
void queue_sum_up(std::uint64_t* before, std::size_t count, cudaStream_t stream);

template <typename Items>
__global__ void give_tiles(Items from, const std::uint64_t* before, std::size_t tiles) {
    for (std::size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        std::uint64_t total = 0;
        std::uint64_t at = before[tile] + sum_before_me<block_threads>(count_mine(from, tile), total);
        const std::size_t begin = tile * tile_items + threadIdx.x * items_per_thread;
        for (std::size_t i = begin; i < begin + items_per_thread && i < from.items; ++i) {
            from.give(i, at);
            at += from.count(i);
        }
    }
}

template <typename Items>
void queue_count(const Items& from, std::uint64_t* before, cudaStream_t stream) {
    const std::size_t tiles = compact_tiles(from.items);
    launch("starting count_tiles", count_tiles<Items>, blocks_for(tiles, 1), block_threads, stream, from, before,
           tiles);
    queue_sum_up(before, tiles, stream);
}

template <typename Items>
void queue_give(const Items& from, const std::uint64_t* before, cudaStream_t stream) {
    const std::size_t tiles = compact_tiles(from.items);
    launch("starting give_tiles", give_tiles<Items>, blocks_for(tiles, 1), block_threads, stream, from, before, tiles);
}

}  // namespace atoll_kernels
