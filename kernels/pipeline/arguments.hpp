#pragma once

#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/thread_pool.hpp"
#include "../loaded.hpp"
#include "pipeline.hpp"

// What Python hands over, checked.
namespace atoll_kernels {

// lr, weight_decay, momentum or beta1, beta2, epsilon.
using Rates5 = std::tuple<double, double, double, double, double>;

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

inline Settings checked_settings(int rank, std::vector<std::vector<int>> islands, int threads, const std::string& policy,
                                 const std::string& values, const std::string& selection, bool error_feedback,
                                 std::int64_t digest_every, std::uint64_t seed, std::int64_t first_step,
                                 const std::string& exchange) {
    if (threads < 1 || threads > max_threads)
        refuse("threads = " + std::to_string(threads) + " is not in 1.." + std::to_string(max_threads));
    return {.rank = rank,
            .islands = std::move(islands),
            .threads = threads,
            .policy = format_named<Policy>(policy, "policy", {{"edf", Policy::edf}, {"fcfs", Policy::fcfs}}),
            .values = format_named<ValueFormat>(values, "values",
                                                {{"float32", ValueFormat::float32},
                                                 {"float16", ValueFormat::float16},
                                                 {"bfloat16", ValueFormat::bfloat16}}),
            .selection = format_named<SelectionRule>(selection, "selection",
                                                     {{"threshold", SelectionRule::threshold},
                                                      {"topk", SelectionRule::topk},
                                                      {"random", SelectionRule::random}}),
            .error_feedback = error_feedback,
            .digest_every = checked_natural(digest_every, "digest_every"),
            .seed = seed,
            .first_step = checked_small(first_step, "first_step"),
            .updates = format_named<bool>(exchange, "exchange", {{"gradients", false}, {"updates", true}})};
}

inline std::size_t checked_keep(std::int64_t keep_blocks) {
    if (keep_blocks < 1) refuse("keep_blocks = " + std::to_string(keep_blocks) + " sends nothing; pass 1 or more");
    return static_cast<std::size_t>(keep_blocks);
}

inline Group checked_group(const Rates5& rates) {
    const double infinity = std::numeric_limits<double>::infinity();
    const auto& [lr, weight_decay, momentum, beta2, epsilon] = rates;
    return {checked_rate(lr, "lr", infinity), checked_rate(weight_decay, "weight_decay", infinity),
            checked_rate(momentum, "momentum_or_beta1", 1), checked_rate(beta2, "beta2", 1),
            checked_rate(epsilon, "epsilon", infinity)};
}

}  // namespace atoll_kernels
