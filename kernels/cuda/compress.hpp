#pragma once

#include "../cpu/select/compress.hpp"
#include "device.hpp"

// The CUDA twins of kernels/cpu/select/compress.hpp, with the same bits. All wait for the result but random_blocks and
// sample_scores, which return when the work is queued.
namespace atoll_kernels {

Selection threshold_block_cuda(const Source& from, float threshold, const Chosen& to, const Queue& queue);
Selection topk_block_cuda(const Source& from, const Chosen& to, const Queue& queue);
Selection random_block_cuda(const Source& from, std::uint64_t seed, const Chosen& to, const Queue& queue);
void random_blocks_cuda(std::uint64_t seed, std::size_t blocks, std::size_t count, std::uint32_t* index,
                        const Queue& queue);
void sample_scores_cuda(const Source& from, std::uint64_t seed, std::size_t count, float* scores, const Queue& queue);

}  // namespace atoll_kernels
