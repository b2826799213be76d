#pragma once

#include "select.cuh"

// The pass over memory that every selection makes, and the copying of what was chosen: the twins of
// kernels/cpu/select/scan.hpp, with the same bits. All of it is queued on the stream.
namespace atoll_kernels {

// Updates the residual; scores[b] = score of block b, -1 if it is not finite; adds how many are not to
// progress->nonfinite. Bound by memory: reads 8n, writes 4.25n bytes with error feedback; reads 4n without.
void queue_scan(const Source& from, float* scores, Progress* progress, cudaStream_t stream);

// Fills to.values with the blocks of to.index, and 0 into the residual: what is sent leaves the residual. As many as
// `progress` chose and there is room for; with none given, to.capacity. Where `scores` (may be null) tells that a block
// is not finite, zeros are emitted and the residual stays.
void queue_take_blocks(const Source& from, const float* scores, const Chosen& to, const Progress* progress,
                       cudaStream_t stream);

}  // namespace atoll_kernels
