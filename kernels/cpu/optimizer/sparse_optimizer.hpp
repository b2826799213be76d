#pragma once

#include <cstddef>
#include <cstdint>

#include "../codec/block_coo.hpp"
#include "../codec/half.hpp"
#include "../select/compress.hpp"

// Optimizers that touch only the blocks an update has: the work is proportional to what was sent.
//
// Per touched entry, in float32, g = scale * value:
//   sgd        g += decay * p;  m = momentum * m + g (without momentum m = g);  p -= lr * m
//   nesterov   as sgd, but p -= lr * (g + momentum * m)
//   adam       g += decay * p;  m += (1 - beta1) (g - m);  v = beta2 * v + (1 - beta2) g g;
//              p -= step_size * m / (sqrt(v) / root2 + epsilon),
//              step_size = lr / (1 - beta1^step), root2 = sqrt(1 - beta2^step)
//   adamw      p *= 1 - lr * decay first, and no decay in g
// torch's rules with a buffer that begins as zeros. Entries in no block keep parameter and moments, whatever the decay:
// weight decay acts on what is touched, once a touch. With last_step (int32 [blocks], the step of a block's last touch,
// 0 at first) the moments of a block are first decayed for the steps it was missed: m *= momentum^missed, and for Adam
// m *= beta1^missed, v *= beta2^missed, missed = max(step - last_step - 1, 0).
//
// A block with a value that is not finite is left out whole and counted. Bound by memory latency: 64 bytes each of
// parameter, moments and values a block. The bits do not depend on threads or processor.
namespace atoll_kernels {

enum class Rule { sgd, nesterov, adam, adamw };

struct Live {  // a copy of the parameters that is kept up to date where they change; null: none
    void* data;
    ValueFormat format;
};

struct Parameters {
    float* shared_param;            // float32 [n]
    float* first;             // momentum or first moment [n]; null: SGD without momentum
    float* second;            // second moment [n], Adam only
    std::int32_t* last_step;  // [blocks], or null: moments of untouched blocks wait as they are
    Live live;
    std::size_t n;
};

struct Hyperparameters {
    Rule rule;
    double lr, weight_decay, momentum_or_beta1, beta2, epsilon, scale;
    std::int32_t step;  // from 1
};

// Returns how many blocks were left out. update.index must pass valid_indices.
std::size_t apply_update(const Parameters& parameters, const Units& update, const Hyperparameters& hyper, int threads,
                         Path path);

}  // namespace atoll_kernels
