#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds the exchange engine, and its threshold's loop, to the module.
void bind_exchange_engine(nanobind::module_& m);

}  // namespace atoll_kernels
