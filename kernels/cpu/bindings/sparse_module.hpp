#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds selection, block COO and the sparse optimizers to the module.
void bind_sparse(nanobind::module_& m);

}  // namespace atoll_kernels
