#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds the engines, and their threshold's loop, to the module.
void bind_exchange_engine(nanobind::module_& m);

}  // namespace atoll_kernels
