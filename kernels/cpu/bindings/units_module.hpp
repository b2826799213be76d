#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds hierarchical hashing, the hash bitmap and sums in coordinate form to the module.
void bind_units(nanobind::module_& m);

}  // namespace atoll_kernels
