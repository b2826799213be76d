#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "../cpu/optimizer/sparse_optimizer.hpp"
#include "../cpu/select/compress.hpp"
#include "loaded.hpp"

// Shared by the CPU's and the CUDA binding of the sparse kernels: a call's objects and numbers in, checked structures
// out. Refusals are as in buffers.hpp.
namespace atoll_kernels {

inline void refuse_two_devices(std::initializer_list<const Loaded*> buffers) {
    const Loaded* const first = *buffers.begin();
    for (const Loaded* const other : buffers) {
        if (!other->given() || other->device_id == first->device_id) continue;
        throw nb::type_error(
            (other->name + " is on another device than " + first->name + "; move it there first").c_str());
    }
}

// The first of them is required.
inline void check_apart(std::initializer_list<const Loaded*> buffers) {
    refuse_two_devices(buffers);
    refuse_overlap(buffers);
}

inline float checked_threshold(double threshold) {
    const auto narrow = static_cast<float>(threshold);
    if (!(narrow >= 0) || !std::isfinite(narrow))
        refuse("threshold = " + std::to_string(threshold) +
               " is not a finite number from 0 on; start from sample_scores");
    return narrow;
}

// The arguments of every selection.
struct SelectionCall {
    Loaded gradient, residual, index, values;
    Source from;
    Chosen to;

    SelectionCall(int device_type, nb::handle gradient_object, nb::handle residual_object, double weight,
                  nb::handle index_object, nb::handle values_object, std::size_t width)
        : gradient(required(gradient_object, "gradient", Access::read, float32_entries, device_type)),
          residual(residual_object, "residual", Access::write, float32_entries, device_type),
          index(required(index_object, "index", Access::write, index_entries, device_type)),
          values(required(values_object, "values", Access::write, float32_entries, device_type)),
          from{gradient.data, residual.data, checked_weight(weight), gradient.entries},
          to{index.as<std::uint32_t>(), values.data, index.entries} {
        check_entries(residual, gradient.entries, "it must be as long as gradient");
        check_entries(values, index.entries * width, "it must hold the values of every index there is room for");
        if ((from.n + width - 1) / width > std::size_t{1} << 32)
            refuse("gradient has " + number(from.n) + " entries, more than indices of 32 bits reach; split it");
        check_apart({&gradient, &residual, &index, &values});
    }
};

inline nb::tuple as_tuple(const Selection& selection) {
    return nb::make_tuple(selection.chosen, selection.found, selection.nonfinite);
}

// The arguments of sample_scores.
struct SampleCall {
    Loaded gradient, residual, scores;
    Source from;

    SampleCall(int device_type, nb::handle gradient_object, nb::handle residual_object, double weight,
               nb::handle scores_object)
        : gradient(required(gradient_object, "gradient", Access::read, float32_entries, device_type)),
          residual(residual_object, "residual", residual_object.is_none() ? Access::write : Access::read,
                   float32_entries, device_type),
          scores(required(scores_object, "scores", Access::write, float32_entries, device_type)),
          from{gradient.data, residual.data, checked_weight(weight), gradient.entries} {
        check_entries(residual, gradient.entries, "it must be as long as gradient");
        if (scores.entries > block_count(gradient.entries)) {
            refuse("scores has room for " + number(scores.entries) + " but there are only " +
                   number(block_count(gradient.entries)) + " blocks; pass a shorter one");
        }
        check_apart({&gradient, &residual, &scores});
    }
};

// The buffer that random_blocks fills.
inline Loaded checked_room(nb::handle index_object, std::size_t blocks) {
    Loaded index = required(index_object, "index", Access::write, index_entries);
    if (blocks > std::size_t{1} << 32) refuse("blocks = " + number(blocks) + " is beyond indices of 32 bits");
    if (index.entries > blocks) {
        refuse("index has room for " + number(index.entries) + " but there are only " + number(blocks) +
               " blocks; pass a shorter one");
    }
    return index;
}

[[noreturn]] inline void refuse_indices(const Loaded& index, std::size_t end) {
    refuse(index.name + " does not ascend, or reaches beyond the last of " + number(end) +
           "; pass what a selection, decode or sum_units wrote");
}

// The arguments of update_blocks; only the indices are left to be checked.
struct UpdateCall {
    Loaded master, first, second, last_step, live, index, values;
    Hyperparameters hyper;

    UpdateCall(int device_type, nb::handle master_object, nb::handle first_object, nb::handle second_object,
               nb::handle last_step_object, nb::handle live_object, nb::handle index_object, nb::handle values_object,
               const std::string& rule_name, std::int32_t step, double lr, double weight_decay,
               double momentum_or_beta1, double beta2, double epsilon, double scale)
        : master(required(master_object, "master", Access::write, float32_entries, device_type)),
          first(first_object, rule_name.starts_with("adam") ? "first_moment" : "momentum_buffer", Access::write,
                float32_entries, device_type),
          second(second_object, "second_moment", Access::write, float32_entries, device_type),
          last_step(last_step_object, "last_step", Access::write, step_entries, device_type),
          live(live_object, "live", Access::write, live_entries, device_type),
          index(required(index_object, "index", Access::read, index_entries, device_type)),
          values(required(values_object, "values", Access::read, float32_entries, device_type)),
          hyper(checked_hyperparameters(rule_name, step, lr, weight_decay, momentum_or_beta1, beta2, epsilon, scale)) {
        const char* const long_as_master = "it must be as long as master";
        check_entries(first, master.entries, long_as_master);
        check_entries(second, master.entries, long_as_master);
        check_entries(live, master.entries, long_as_master);
        check_entries(last_step, block_count(master.entries), "it must have one entry for each block of master");
        check_entries(values, index.entries * block_entries, "it must hold 16 values for every index");
        if ((hyper.rule == Rule::nesterov && !first.given()) ||
            (is_adaptive(hyper.rule) && !(first.given() && second.given())))
            refuse("rule '" + rule_name + "' needs its moments; pass buffers of zeros, as long as master");
        check_apart({&master, &first, &second, &last_step, &live, &index, &values});
    }

    Parameters parameters() const {
        return {master.data, first.data, second.data, last_step.as<std::int32_t>(), live_of(live), master.entries};
    }
    Units update() const { return {index.as<std::uint32_t>(), values.data, index.entries}; }

  private:
    static bool is_adaptive(Rule rule) { return rule == Rule::adam || rule == Rule::adamw; }

    static Hyperparameters checked_hyperparameters(const std::string& rule_name, std::int32_t step, double lr,
                                                   double weight_decay, double momentum_or_beta1, double beta2,
                                                   double epsilon, double scale) {
        const Rule rule = format_named<Rule>(
            rule_name, "rule",
            {{"sgd", Rule::sgd}, {"nesterov", Rule::nesterov}, {"adam", Rule::adam}, {"adamw", Rule::adamw}});
        const double infinity = std::numeric_limits<double>::infinity();
        if (step < 1) refuse("step = " + std::to_string(step) + " is not a step; the first is 1");
        return {rule,
                checked_hyperparameter(lr, "lr", infinity),
                checked_hyperparameter(weight_decay, "weight_decay", infinity),
                checked_hyperparameter(momentum_or_beta1, is_adaptive(rule) ? "beta1" : "momentum", 1),
                checked_hyperparameter(beta2, "beta2", 1),
                checked_hyperparameter(epsilon, "epsilon", infinity),
                checked_hyperparameter(scale, "scale", infinity),
                step};
    }
};

}  // namespace atoll_kernels
