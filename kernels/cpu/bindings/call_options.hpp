#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "../processor/features.hpp"
#include "../processor/thread_pool.hpp"

// The two options that every kernel on the CPU has.
namespace atoll_kernels {

inline Path chosen_path(bool portable) { return portable ? Path::portable : best_path(); }

inline int checked_threads(int threads) {
    if (threads < 0 || threads > max_threads) {
        throw nanobind::value_error(("threads = " + std::to_string(threads) + " is not in 0.." +
                                     std::to_string(max_threads) + "; leave it out to have the number chosen")
                                        .c_str());
    }
    return threads;
}

}  // namespace atoll_kernels
