#include "signs_module.hpp"

#include "../../bindings/gil.hpp"
#include "../../bindings/sign_calls.hpp"
#include "call_options.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

void encode_signs(nb::handle values, nb::handle bits, nb::handle scales, bool two_sided, int threads,
                  bool portable) {
    const int checked = checked_threads(threads);
    const SignCall call(cpu, values, bits, scales, two_sided, Access::write);
    const GilReleased released(call.values.entries);
    sign_encode(call.values.data, call.values.entries, call.code, checked, chosen_path(portable));
}

void add_signs(nb::handle bits, nb::handle scales, nb::handle out, bool two_sided, int threads,
               bool portable) {
    const int checked = checked_threads(threads);
    const SignCall call(cpu, out, bits, scales, two_sided, Access::read);
    const GilReleased released(call.values.entries);
    sign_add(call.code, call.values.data, call.values.entries, checked, chosen_path(portable));
}

}  // namespace

void bind_signs(nb::module_& m) {
    m.def("sign_encode", encode_signs, "values"_a.none(), "bits"_a.none(), "scales"_a.none(), "two_sided"_a,
          "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("sign_add", add_signs, "bits"_a.none(), "scales"_a.none(), "out"_a.none(), "two_sided"_a, "threads"_a = 0,
          nb::kw_only(), "portable"_a = false);
}

}  // namespace atoll_kernels
