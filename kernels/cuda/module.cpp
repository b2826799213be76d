#include <nanobind/nanobind.h>

#include <cstdint>

#include "../bindings/buffers.hpp"
#include "../bindings/gil.hpp"
#include "device.hpp"
#include "device_type.hpp"
#include "reduce.hpp"
#include "hashing_module.hpp"
#include "signs_module.hpp"
#include "sparse_module.hpp"

namespace nb = nanobind;
namespace ak = atoll_kernels;
using namespace nb::literals;

namespace {

double squared_norm(nb::handle object, std::uintptr_t stream) {
    const ak::Buffer x = ak::load_buffer(object, "x", ak::cuda, ak::Access::read);
    const ak::GilReleased released(ak::always);
    return ak::squared_norm_cuda(x.data, x.entries, x.device_id, ak::stream_of(stream));
}

void weighted_sum(nb::handle out, nb::handle inputs, nb::handle weights, std::uintptr_t stream) {
    const ak::WeightedSumCall call(out, inputs, weights, ak::cuda);
    const ak::GilReleased released(ak::always);
    ak::weighted_sum_cuda(call.out.data, call.out.entries, call.inputs.data(), call.inputs.size(), call.out.device_id,
                          ak::stream_of(stream));
}

}  // namespace

NB_MODULE(_cuda, m) {
    m.doc() = "Atoll's kernels on CUDA devices; atoll.kernels is the door to them.";
    nb::exception<ak::CudaError>(m, "CudaError", PyExc_RuntimeError);
    m.def("device_count", ak::cuda_device_count);
    m.def("squared_norm", squared_norm, "x"_a.none(), "stream"_a);
    m.def("weighted_sum", weighted_sum, "out"_a.none(), "inputs"_a.none(), "weights"_a.none(), "stream"_a);
    ak::bind_sparse_cuda(m);
    ak::bind_hashing_cuda(m);
    ak::bind_signs_cuda(m);
}
