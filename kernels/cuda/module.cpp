#include <nanobind/nanobind.h>

#include "device.hpp"
#include "signs_module.hpp"
#include "sparse_module.hpp"

namespace nb = nanobind;
namespace ak = atoll_kernels;

NB_MODULE(_cuda, m) {
    m.doc() = "Atoll's kernels on CUDA devices; atoll.kernels is the door to them.";
    nb::exception<ak::CudaError>(m, "CudaError", PyExc_RuntimeError);
    m.def("device_count", ak::cuda_device_count);
    // The compute capabilities that this build has machine code and PTX for: 75 stands for 7.5.
    m.attr("architectures") = nb::make_tuple(ATOLL_CUDA_ARCHITECTURES);
    ak::bind_sparse_cuda(m);
    ak::bind_signs_cuda(m);
}
