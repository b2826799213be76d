#pragma once

#include "../cpu/optimizer/sparse_optimizer.hpp"
#include "compress.hpp"

// The CUDA twins of kernels/cpu/optimizer/sparse_optimizer.hpp, with the same bits, and what brings updates to a
// model's weights.
namespace atoll_kernels {

struct UpdateResult {
    bool valid;            // false: indices do not ascend or reach beyond the end; then nothing was changed
    std::size_t left_out;  // blocks that are not finite
};

// Waits for the result. Bound by memory and latency, as on the CPU.
UpdateResult apply_update_cuda(const Parameters& parameters, const Units& update, const Hyperparameters& hyper,
                               const Queue& queue);

// live[16 * index[k] + i] = values[16 * k + i], rounded to live's format as torch rounds, for i below 16 and the end of
// live [n]. Returns when the work is queued: blocks beyond the end are ignored, not refused. Indices must differ.
void scatter_blocks_cuda(const Live& live, std::size_t n, const Units& update, const Queue& queue);

}  // namespace atoll_kernels
