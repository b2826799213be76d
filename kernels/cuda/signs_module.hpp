#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds the codec of signs to the module.
void bind_signs_cuda(nanobind::module_& m);

}  // namespace atoll_kernels
