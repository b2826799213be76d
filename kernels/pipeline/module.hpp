#pragma once

#include <nanobind/nanobind.h>

namespace atoll_kernels {

// Adds the pipeline, and its twin of atoll.kernels.aimd, to the module.
void bind_pipeline(nanobind::module_& m);

}  // namespace atoll_kernels
