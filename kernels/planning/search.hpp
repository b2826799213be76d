#pragma once

#include <cstdint>

#include "timeline.hpp"

namespace atoll_kernels {

struct Searched {
    Choice choice;
    double end_s;
};

// Returns an option for each tensor with a short timeline. Exact where all choices can be tried. Otherwise no longer
// than one option for all tensors, nor than one option from a size on and another below it, for a few sizes.
//
// tasks: about how many to simulate over all timelines. The search reads no clock, so the answer is the same
// everywhere.
// Source: Espresso (Wang, 2023), Algorithm 4.1: one tensor's option at a time, the largest first. Ours: several starts,
// descents from shaken choices for as long as the tasks last, and bounds in place of the bubbles. Changing tensors of
// one size and option together (Algorithm 4.2) improved none of 74 plans. Changing pairs of tensors took the time of
// more descents, which find more.
Searched search(Timeline& timeline, std::uint64_t tasks);

}  // namespace atoll_kernels
