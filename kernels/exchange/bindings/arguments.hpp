#pragma once

#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../bindings/loaded.hpp"
#include "../../cpu/processor/thread_pool.hpp"
#include "../engine/exchange_engine.hpp"

// Checks of what Python hands over.
namespace atoll_kernels {

// lr, weight_decay, momentum or beta1, beta2, epsilon.
using Hyperparameters5 = std::tuple<double, double, double, double, double>;

inline std::int64_t checked_natural(std::int64_t value, const char* name) {
    if (value < 0) refuse(std::string(name) + " = " + std::to_string(value) + " is negative; pass 0 or more");
    return value;
}

// Small enough that nothing added to it overflows.
inline std::int64_t checked_small(std::int64_t value, const char* name) {
    if (checked_natural(value, name) >> 62 != 0)
        refuse(std::string(name) + " = " + std::to_string(value) + " is too large; pass less than 2^62");
    return value;
}

inline std::size_t checked_k_blocks(std::int64_t k_blocks) {
    if (k_blocks < 1) refuse("k_blocks = " + std::to_string(k_blocks) + " sends nothing; pass 1 or more");
    return static_cast<std::size_t>(k_blocks);
}

// Of a rank's updates in the shared parameters.
inline float checked_share(double weight) {
    const auto narrow = static_cast<float>(weight);
    if (!(narrow > 0 && narrow <= 1))
        refuse("weight = " + std::to_string(weight) + " is not in 0..1, 0 left out; pass this rank's share of a batch");
    return narrow;
}

inline ParameterGroup checked_parameter_group(const Hyperparameters5& hyper) {
    const double infinity = std::numeric_limits<double>::infinity();
    const auto& [lr, weight_decay, momentum, beta2, epsilon] = hyper;
    return {checked_hyperparameter(lr, "lr", infinity), checked_hyperparameter(weight_decay, "weight_decay", infinity),
            checked_hyperparameter(momentum, "momentum_or_beta1", 1), checked_hyperparameter(beta2, "beta2", 1),
            checked_hyperparameter(epsilon, "epsilon", infinity)};
}

}  // namespace atoll_kernels
