#pragma once

#include "../cpu/hashing/hash_bitmap.hpp"
#include "../cpu/hashing/hierarchical_hash.hpp"
#include "compress.hpp"

// The CUDA twins of kernels/cpu/hashing: the same partitions and bitmaps, order within a partition aside. All wait for
// the result.
namespace atoll_kernels {

Partitioned hierarchical_hash_cuda(const std::uint32_t* unit, std::size_t count, const HashSeeds& seeds,
                                   std::size_t partitions, std::size_t slots, std::uint32_t* order,
                                   const Queue& queue);
bool bitmap_encode_cuda(const std::uint32_t* member, std::size_t members, const std::uint32_t* unit, std::size_t count,
                        std::uint8_t* bitmap, const Queue& queue);
bool bitmap_decode_cuda(const std::uint32_t* member, std::size_t members, const std::uint8_t* bitmap,
                        std::uint32_t* unit, std::size_t count, const Queue& queue);

}  // namespace atoll_kernels
