#pragma once

#include <cmath>
#include <cstdint>

#include "sparse_optimizer.hpp"

// The constants that a step's hyperparameters come to for one entry, in float32.
namespace atoll_kernels {

struct Constants {
    float lr, decay, scale, momentum, beta2, one_minus_beta1, one_minus_beta2, step_size, root2, epsilon, shrink;
};

// x^n by squaring: multiplications alone, so the same everywhere, as std::pow is not.
ATOLL_INLINE double power(double x, std::uint32_t n) {
    double result = 1;
    for (; n != 0; n >>= 1, x *= x) {
        if ((n & 1) != 0) result *= x;
    }
    return result;
}

inline Constants prepare(const Hyperparameters& hyper) {
    const auto step = static_cast<std::uint32_t>(hyper.step);
    const double first = hyper.momentum_or_beta1;
    return {
        .lr = static_cast<float>(hyper.lr),
        .decay = static_cast<float>(hyper.weight_decay),
        .scale = static_cast<float>(hyper.scale),
        .momentum = static_cast<float>(first),
        .beta2 = static_cast<float>(hyper.beta2),
        .one_minus_beta1 = static_cast<float>(1 - first),
        .one_minus_beta2 = static_cast<float>(1 - hyper.beta2),
        .step_size = static_cast<float>(hyper.lr / (1 - power(first, step))),
        .root2 = static_cast<float>(std::sqrt(1 - power(hyper.beta2, step))),
        .epsilon = static_cast<float>(hyper.epsilon),
        .shrink = static_cast<float>(1 - hyper.lr * hyper.weight_decay),
    };
}

}  // namespace atoll_kernels
