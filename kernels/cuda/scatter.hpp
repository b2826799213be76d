#pragma once

#include "../cpu/optimizer/sparse_optimizer.hpp"
#include "compress.hpp"

// What brings updates to a model's weights on its device.
namespace atoll_kernels {

// live[16 * index[k] + i] = values[16 * k + i], rounded to live's format as torch rounds, for i below 16 and the end of
// live [n]. Returns when the work is queued: blocks beyond the end are ignored, not refused. Indices must differ.
void scatter_blocks_cuda(const Live& live, std::size_t n, const Units& update, const Queue& queue);

}  // namespace atoll_kernels
