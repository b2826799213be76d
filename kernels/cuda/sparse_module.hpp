#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds selection, the sparse optimizers and the scattering of blocks to the module.
void bind_sparse_cuda(nanobind::module_& m);

}  // namespace atoll_kernels
