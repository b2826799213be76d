#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds the timeline of an iteration, and the searches on it, to the module.
void bind_planning(nanobind::module_& m);

}  // namespace atoll_kernels
