#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "../cpu/codec/wire_values.hpp"
#include "../cpu/optimizer/sparse_optimizer.hpp"
#include "buffers.hpp"

// Shared by the bindings of the sparse kernels, of their CUDA twins and of the exchange engine: buffers of several
// entry types, some of them optional, and the checks of numbers and names.
namespace atoll_kernels {

inline constexpr int cpu = nb::device::cpu::value;

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
inline constexpr EntryType live_entries{"float32, float16 or bfloat16", [](nb::dlpack::dtype d) {
                                            return d == nb::dtype<float>() ||
                                                   has_bits(d, nb::dlpack::dtype_code::Float, 16) ||
                                                   has_bits(d, nb::dlpack::dtype_code::Bfloat, 16);
                                        }};

[[noreturn]] inline void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

inline std::string number(std::size_t value) { return std::to_string(value); }

// A buffer that may be left out (None).
struct Loaded : Buffer {
    std::string name;
    Access access = Access::read;

    Loaded(nb::handle object, const char* text, Access how, const EntryType& type = float32_entries,
           int device_type = cpu)
        : Buffer(object.is_none() && how == Access::write ? Buffer{}
                                                          : load_buffer(object, text, device_type, how, type)),
          name(text),
          access(how) {}

    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }
    std::size_t bytes() const { return entries * (dtype.bits / 8); }
    bool given() const { return dtype.bits != 0; }
};

inline Loaded required(nb::handle object, const char* name, Access access, const EntryType& type = float32_entries,
                       int device_type = cpu) {
    if (object.is_none())
        throw nb::type_error((std::string(name) + " is None; pass a " + type.name + " buffer").c_str());
    return {object, name, access, type, device_type};
}

inline void check_entries(const Loaded& buffer, std::size_t entries, const char* why) {
    if (buffer.given() && buffer.entries != entries) {
        refuse(buffer.name + " has " + number(buffer.entries) + " entries, not " + number(entries) + "; " + why);
    }
}

inline void refuse_overlap(std::initializer_list<const Loaded*> buffers) {
    for (const Loaded* const* a = buffers.begin(); a != buffers.end(); ++a) {
        for (const Loaded* const* b = a + 1; b != buffers.end(); ++b) {
            if ((*a)->access == Access::read && (*b)->access == Access::read) continue;
            if ((*a)->bytes() == 0 || (*b)->bytes() == 0) continue;
            const auto x = reinterpret_cast<std::uintptr_t>((*a)->data),
                       y = reinterpret_cast<std::uintptr_t>((*b)->data);
            if (x < y + (*b)->bytes() && y < x + (*a)->bytes())
                refuse((*a)->name + " and " + (*b)->name + " share memory; pass separate buffers");
        }
    }
}

inline float checked_weight(double weight) {
    const auto narrow = static_cast<float>(weight);
    if (!std::isfinite(narrow))
        refuse("weight = " + std::to_string(weight) + " is not finite in float32; pass b_i / B");
    return narrow;
}

template <typename Format>
Format format_named(const std::string& name, const char* what,
                    std::initializer_list<std::pair<const char*, Format>> all) {
    std::string names;
    for (const auto& [text, format] : all) {
        if (name == text) return format;
        names += (names.empty() ? "" : ", ") + std::string(text);
    }
    refuse(std::string(what) + " = '" + name + "' is not known; pass one of " + names);
}

inline WireValues wire_values_named(const std::string& name, const char* what) {
    return format_named<WireValues>(name, what,
                                    {{"float32", WireValues::float32},
                                     {"float16", WireValues::float16},
                                     {"bfloat16", WireValues::bfloat16},
                                     {"int8", WireValues::int8},
                                     {"int4", WireValues::int4},
                                     {"int2", WireValues::int2}});
}

inline Live live_of(const Loaded& live) {
    if (!live.given()) return {nullptr, ValueFormat::float32};
    const bool brain = live.dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);
    return {live.data, live.dtype.bits == 32 ? ValueFormat::float32
                       : brain               ? ValueFormat::bfloat16
                                             : ValueFormat::float16};
}

inline double checked_hyperparameter(double value, const char* name, double below) {
    if (!(value >= 0 && value < below)) {
        refuse(std::string(name) + " = " + std::to_string(value) +
               (std::isfinite(below) ? " is not in 0..1, 1 left out" : " is not a finite number from 0 on"));
    }
    return value;
}

}  // namespace atoll_kernels
