#include <nanobind/nanobind.h>

#include <cstdint>

#include "../bindings/gil.hpp"
#include "../bindings/sparse_calls.hpp"
#include "compress.hpp"
#include "device.hpp"
#include "signs.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

// The device that the buffers must lie on. The CPU only where tests/kernels runs the kernels without a GPU.
#if defined(ATOLL_CUDA_ON_CPU)
constexpr int cuda = nb::device::cpu::value;
#else
constexpr int cuda = nb::device::cuda::value;
#endif

// Queueing may block for as long as the device is behind, however short the buffer is.
constexpr std::size_t always = SIZE_MAX;

Queue queue_of(const Loaded& buffer, std::uintptr_t stream) {
    return {buffer.device_id, reinterpret_cast<void*>(stream)};
}

template <auto kernel, typename... Rule>
struct Select {
    static nb::tuple call(nb::handle gradient, nb::handle residual, double weight, Rule... rule, nb::handle index,
                          nb::handle values, std::uintptr_t stream) {
        const SelectionCall call(cuda, gradient, residual, weight, index, values);
        return as_tuple(without_gil(always, [&, ... number = checked_rule(rule)] {
            return kernel(call.from, number..., call.to, queue_of(call.gradient, stream));
        }));
    }
};

template <typename Call, typename... Names>
void define(nb::module_& m, const char* name, Names... rule) {
    m.def(name, Call::call, "gradient"_a.none(), "residual"_a.none(), "weight"_a, rule..., "index"_a.none(),
          "values"_a.none(), "stream"_a);
}

void fill_sample_scores(nb::handle gradient, nb::handle residual, double weight, std::uint64_t seed, nb::handle scores,
                        std::uintptr_t stream) {
    const SampleCall call(cuda, gradient, residual, weight, scores);
    const GilReleased released(always);
    sample_scores_cuda(call.from, seed, call.scores.entries, call.scores.data, queue_of(call.gradient, stream));
}

void encode_signs(nb::handle values, nb::handle bits, nb::handle scales, bool two_sided, std::uintptr_t stream) {
    const SignCall call(cuda, values, bits, scales, two_sided, Access::write);
    const GilReleased released(always);
    sign_encode_cuda(call.values.data, call.values.entries, call.code, queue_of(call.values, stream));
}

void add_signs(nb::handle bits, nb::handle scales, nb::handle out, bool two_sided, std::uintptr_t stream) {
    const SignCall call(cuda, out, bits, scales, two_sided, Access::read);
    const GilReleased released(always);
    sign_add_cuda(call.code, call.values.data, call.values.entries, queue_of(call.values, stream));
}

}  // namespace
}  // namespace atoll_kernels

NB_MODULE(_cuda, m) {
    using namespace atoll_kernels;
    m.doc() = "Atoll's kernels on CUDA devices; atoll.kernels is the door to them.";
    nb::exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
    m.def("device_count", cuda_device_count);
    // The compute capabilities that this build has machine code and PTX for: 75 stands for 7.5.
    m.attr("architectures") = nb::make_tuple(ATOLL_CUDA_ARCHITECTURES);
    define<Select<threshold_block_cuda, double>>(m, "threshold_block", "threshold"_a);
    define<Select<topk_block_cuda>>(m, "topk_block");
    define<Select<random_block_cuda, std::uint64_t>>(m, "random_block", "seed"_a);
    m.def("sample_scores", fill_sample_scores, "gradient"_a.none(), "residual"_a.none(), "weight"_a, "seed"_a,
          "scores"_a.none(), "stream"_a);
    m.def("sign_encode", encode_signs, "values"_a.none(), "bits"_a.none(), "scales"_a.none(), "two_sided"_a,
          "stream"_a);
    m.def("sign_add", add_signs, "bits"_a.none(), "scales"_a.none(), "out"_a.none(), "two_sided"_a, "stream"_a);
}
