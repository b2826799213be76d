#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds hierarchical hashing and the hash bitmap to the module.
void bind_hashing_cuda(nanobind::module_& m);

}  // namespace atoll_kernels
