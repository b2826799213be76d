#include "signs_module.hpp"

#include "../bindings/gil.hpp"
#include "../bindings/sign_calls.hpp"
#include "device_type.hpp"
#include "signs.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

void encode_signs(nb::handle values, nb::handle bits, nb::handle scales, bool two_sided, std::uintptr_t stream) {
    const SignCall call(cuda, values, bits, scales, two_sided, Access::write);
    const GilReleased released(always);
    sign_encode_cuda(call.values.data, call.values.entries, call.code, call.values.device_id, stream_of(stream));
}

void add_signs(nb::handle bits, nb::handle scales, nb::handle out, bool two_sided, std::uintptr_t stream) {
    const SignCall call(cuda, out, bits, scales, two_sided, Access::read);
    const GilReleased released(always);
    sign_add_cuda(call.code, call.values.data, call.values.entries, call.values.device_id, stream_of(stream));
}

}  // namespace

void bind_signs_cuda(nb::module_& m) {
    m.def("sign_encode", encode_signs, "values"_a.none(), "bits"_a.none(), "scales"_a.none(), "two_sided"_a,
          "stream"_a);
    m.def("sign_add", add_signs, "bits"_a.none(), "scales"_a.none(), "out"_a.none(), "two_sided"_a, "stream"_a);
}

}  // namespace atoll_kernels
