#pragma once

#include <cstddef>

#include "../processor/features.hpp"

namespace atoll_kernels {

constexpr std::size_t max_inputs = 128;

struct WeightedInput {
    const float* x;
    float weight;
};

// out[i] = inputs[0].weight * inputs[0].x[i] + inputs[1].weight * inputs[1].x[i] + ...
//   out, inputs[k].x: float32 [n], any alignment, n = 0 allowed; an x may be out itself (in place), else it must not
//   overlap out. count <= max_inputs; 0 inputs set out to 0.
// Every product and every sum is rounded to float32, from the first input to the last, without fused multiply-add: the
// same bits as the same expression in NumPy, for every number of threads and on every processor.
// Bound by memory: reads 4n bytes an input, writes 4n.
void weighted_sum(float* out, std::size_t n, const WeightedInput* inputs, std::size_t count, int threads, Path path);

}  // namespace atoll_kernels
