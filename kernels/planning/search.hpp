#pragma once

#include <cstdint>

#include "timeline.hpp"

namespace atoll_kernels {

struct Searched {
    Choice choice;
    double end_s;
};

// An option for each tensor with a short timeline. Exact where all choices can be tried; else no longer than one option
// for all tensors, nor than one option for those from a size on and another for the rest, for a few sizes.
//
// tasks: how many to serve in about, over all timelines looked at. The answer is the same everywhere: no clock is asked.
// Source: Espresso (Wang, 2023), Algorithms 4.1 (the largest first, one tensor's option at a time) and 4.2 (the first u
// of those of one size and option). Ours: several starts, two tensors at once, descents from shaken choices for as long
// as the tasks last, and bounds in place of the bubbles.
Searched search(Timeline& timeline, std::uint64_t tasks);

}  // namespace atoll_kernels
