#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "buffers.hpp"
#include "cpu/compress.hpp"
#include "cpu/sparse_optimizer.hpp"

// What the CPU's and the CUDA binding of the sparse kernels share: a call's objects and numbers in, checked structures
// out. Refusals are as in buffers.hpp.
namespace atoll_kernels {

inline bool has_bits(nb::dlpack::dtype d, nb::dlpack::dtype_code code, unsigned bits) {
    return d.code == static_cast<std::uint8_t>(code) && d.bits == bits && d.lanes == 1;
}

inline constexpr EntryType index_entries{"uint32 or int32", [](nb::dlpack::dtype d) {
                                             return has_bits(d, nb::dlpack::dtype_code::UInt, 32) ||
                                                    has_bits(d, nb::dlpack::dtype_code::Int, 32);
                                         }};
inline constexpr EntryType step_entries{
    "int32", [](nb::dlpack::dtype d) { return has_bits(d, nb::dlpack::dtype_code::Int, 32); }};
inline constexpr EntryType byte_entries{
    "uint8", [](nb::dlpack::dtype d) { return has_bits(d, nb::dlpack::dtype_code::UInt, 8); }};
inline constexpr EntryType live_entries{
    "float32, float16 or bfloat16", [](nb::dlpack::dtype d) {
        return d == nb::dtype<float>() || has_bits(d, nb::dlpack::dtype_code::Float, 16) ||
               has_bits(d, nb::dlpack::dtype_code::Bfloat, 16);
    }};

[[noreturn]] inline void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

inline std::string number(std::size_t value) { return std::to_string(value); }

// A buffer that may be left out (None).
struct Loaded : Buffer {
    std::string name;
    Access access = Access::read;

    Loaded(int device_type, nb::handle object, const char* text, Access how, const EntryType& type = float32_entries)
        : Buffer(object.is_none() && how == Access::write ? Buffer{} : load_buffer(object, text, device_type, how, type)),
          name(text),
          access(how) {}

    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }
    std::size_t bytes() const { return entries * (dtype.bits / 8); }
    bool given() const { return dtype.bits != 0; }
};

inline Loaded required(int device_type, nb::handle object, const char* name, Access access,
                       const EntryType& type = float32_entries) {
    if (object.is_none()) throw nb::type_error((std::string(name) + " is None; pass a " + type.name + " buffer").c_str());
    return {device_type, object, name, access, type};
}

inline void check_entries(const Loaded& buffer, std::size_t entries, const char* why) {
    if (buffer.given() && buffer.entries != entries) {
        refuse(buffer.name + " has " + number(buffer.entries) + " entries, not " + number(entries) + "; " + why);
    }
}

// All of a call's buffers: on one device, and none that is written shares memory with another.
inline void check_apart(std::initializer_list<const Loaded*> buffers) {
    for (const Loaded* const* a = buffers.begin(); a != buffers.end(); ++a) {
        for (const Loaded* const* b = a + 1; b != buffers.end(); ++b) {
            if (!(*a)->given() || !(*b)->given()) continue;
            if ((*a)->device_id != (*b)->device_id)
                throw nb::type_error(((*b)->name + " is on another device than " + (*a)->name + "; move it there first").c_str());
            if ((*a)->access == Access::read && (*b)->access == Access::read) continue;
            if ((*a)->bytes() == 0 || (*b)->bytes() == 0) continue;
            const auto x = reinterpret_cast<std::uintptr_t>((*a)->data), y = reinterpret_cast<std::uintptr_t>((*b)->data);
            if (x < y + (*b)->bytes() && y < x + (*a)->bytes())
                refuse((*a)->name + " and " + (*b)->name + " share memory; pass separate buffers");
        }
    }
}

inline float checked_weight(double weight) {
    const auto narrow = static_cast<float>(weight);
    if (!std::isfinite(narrow)) refuse("weight = " + std::to_string(weight) + " is not finite in float32; pass b_i / B");
    return narrow;
}

inline float checked_threshold(double threshold) {
    const auto narrow = static_cast<float>(threshold);
    if (!(narrow >= 0) || !std::isfinite(narrow))
        refuse("threshold = " + std::to_string(threshold) + " is not a finite number from 0 on; start from sample_scores");
    return narrow;
}

// What every selection is called with.
struct SelectionCall {
    Loaded gradient, residual, index, values;
    Source from;
    Chosen to;

    SelectionCall(int device_type, nb::handle gradient_object, nb::handle residual_object, double weight,
                  nb::handle index_object, nb::handle values_object, std::size_t width)
        : gradient(required(device_type, gradient_object, "gradient", Access::read)),
          residual(device_type, residual_object, "residual", Access::write),
          index(required(device_type, index_object, "index", Access::write, index_entries)),
          values(required(device_type, values_object, "values", Access::write)),
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
    return nb::make_tuple(selection.kept, selection.found, selection.nonfinite);
}

// What sample_scores is called with.
struct SampleCall {
    Loaded gradient, residual, scores;
    Source from;

    SampleCall(int device_type, nb::handle gradient_object, nb::handle residual_object, double weight,
               nb::handle scores_object)
        : gradient(required(device_type, gradient_object, "gradient", Access::read)),
          residual(device_type, residual_object, "residual",
                   residual_object.is_none() ? Access::write : Access::read),
          scores(required(device_type, scores_object, "scores", Access::write)),
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
inline Loaded checked_room(int device_type, nb::handle index_object, std::size_t blocks) {
    Loaded index = required(device_type, index_object, "index", Access::write, index_entries);
    if (blocks > std::size_t{1} << 32) refuse("blocks = " + number(blocks) + " is beyond indices of 32 bits");
    if (index.entries > blocks) {
        refuse("index has room for " + number(index.entries) + " but there are only " + number(blocks) +
               " blocks; pass a shorter one");
    }
    return index;
}

template <typename Format>
Format format_named(const std::string& name, const char* what, std::initializer_list<std::pair<const char*, Format>> all) {
    std::string names;
    for (const auto& [text, format] : all) {
        if (name == text) return format;
        names += (names.empty() ? "" : ", ") + std::string(text);
    }
    refuse(std::string(what) + " = '" + name + "' is not known; pass one of " + names);
}

[[noreturn]] inline void refuse_indices(const Loaded& index, std::size_t end) {
    refuse(index.name + " does not ascend, or reaches beyond the last of " + number(end) +
           "; pass what a selection, decode or sum_units wrote");
}

inline Live live_of(const Loaded& live) {
    if (!live.given()) return {nullptr, ValueFormat::float32};
    const bool brain = live.dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);
    return {live.data, live.dtype.bits == 32 ? ValueFormat::float32 : brain ? ValueFormat::bfloat16 : ValueFormat::float16};
}

inline double checked_rate(double value, const char* name, double below) {
    if (!(value >= 0 && value < below)) {
        refuse(std::string(name) + " = " + std::to_string(value) +
               (std::isfinite(below) ? " is not in 0..1, 1 left out" : " is not a finite number from 0 on"));
    }
    return value;
}

// What update_blocks is called with; only the indices are left to be checked.
struct UpdateCall {
    Loaded master, first, second, last_step, live, index, values;
    Rates rates;

    UpdateCall(int device_type, nb::handle master_object, nb::handle first_object, nb::handle second_object,
               nb::handle last_step_object, nb::handle live_object, nb::handle index_object, nb::handle values_object,
               const std::string& rule_name, std::int32_t step, double lr, double weight_decay, double momentum_or_beta1,
               double beta2, double epsilon, double scale)
        : master(required(device_type, master_object, "master", Access::write)),
          first(device_type, first_object, rule_name.starts_with("adam") ? "first_moment" : "momentum_buffer",
                Access::write),
          second(device_type, second_object, "second_moment", Access::write),
          last_step(device_type, last_step_object, "last_step", Access::write, step_entries),
          live(device_type, live_object, "live", Access::write, live_entries),
          index(required(device_type, index_object, "index", Access::read, index_entries)),
          values(required(device_type, values_object, "values", Access::read)),
          rates(checked_rates(rule_name, step, lr, weight_decay, momentum_or_beta1, beta2, epsilon, scale)) {
        const char* const long_as_master = "it must be as long as master";
        check_entries(first, master.entries, long_as_master);
        check_entries(second, master.entries, long_as_master);
        check_entries(live, master.entries, long_as_master);
        check_entries(last_step, block_count(master.entries), "it must have one entry for each block of master");
        check_entries(values, index.entries * block_entries, "it must hold 16 values for every index");
        if ((rates.rule == Rule::nesterov && !first.given()) || (is_adaptive(rates.rule) && !(first.given() && second.given())))
            refuse("rule '" + rule_name + "' needs its moments; pass buffers of zeros, as long as master");
        check_apart({&master, &first, &second, &last_step, &live, &index, &values});
    }

    Parameters parameters() const {
        return {master.data, first.data, second.data, last_step.as<std::int32_t>(), live_of(live), master.entries};
    }
    Units update() const { return {index.as<std::uint32_t>(), values.data, index.entries}; }

  private:
    static bool is_adaptive(Rule rule) { return rule == Rule::adam || rule == Rule::adamw; }

    static Rates checked_rates(const std::string& rule_name, std::int32_t step, double lr, double weight_decay,
                               double momentum_or_beta1, double beta2, double epsilon, double scale) {
        const Rule rule = format_named<Rule>(
            rule_name, "rule",
            {{"sgd", Rule::sgd}, {"nesterov", Rule::nesterov}, {"adam", Rule::adam}, {"adamw", Rule::adamw}});
        const double infinity = std::numeric_limits<double>::infinity();
        if (step < 1) refuse("step = " + std::to_string(step) + " is not a step; the first is 1");
        return {rule,
                checked_rate(lr, "lr", infinity),
                checked_rate(weight_decay, "weight_decay", infinity),
                checked_rate(momentum_or_beta1, is_adaptive(rule) ? "beta1" : "momentum", 1),
                checked_rate(beta2, "beta2", 1),
                checked_rate(epsilon, "epsilon", infinity),
                checked_rate(scale, "scale", infinity),
                step};
    }
};

}  // namespace atoll_kernels
