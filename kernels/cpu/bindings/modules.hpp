#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds selection and signs to the module.
void bind_sparse(nanobind::module_& m);

// Adds hierarchical hashing, the hash bitmap and sums in coordinate form to the module.
void bind_units(nanobind::module_& m);

// Adds the timeline of an iteration, and the searches on it, to the module.
void bind_planning(nanobind::module_& m);

}  // namespace atoll_kernels
