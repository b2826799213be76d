#include <cstdint>

#include "../../bindings/gil.hpp"
#include "../../bindings/sparse_calls.hpp"
#include "../codec/signs.hpp"
#include "../select/compress.hpp"
#include "call_options.hpp"
#include "modules.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

template <auto kernel, typename... Rule>
struct Select {
    static nb::tuple call(nb::handle gradient, nb::handle residual, double weight, Rule... rule, nb::handle index,
                          nb::handle values, int threads, bool portable) {
        const int checked = checked_threads(threads);
        const SelectionCall call(cpu, gradient, residual, weight, index, values);
        return as_tuple(without_gil(call.from.n, [&, ... number = checked_rule(rule)] {
            return kernel(call.from, number..., call.to, checked, chosen_path(portable));
        }));
    }
};

template <typename Call, typename... Names>
void define(nb::module_& m, const char* name, Names... rule) {
    m.def(name, Call::call, "gradient"_a.none(), "residual"_a.none(), "weight"_a, rule..., "index"_a.none(),
          "values"_a.none(), "threads"_a = 0, nb::kw_only(), "portable"_a = false);
}

void fill_sample_scores(nb::handle gradient, nb::handle residual, double weight, std::uint64_t seed,
                        nb::handle scores) {
    const SampleCall call(cpu, gradient, residual, weight, scores);
    const GilReleased released(call.scores.entries * block_entries);
    sample_scores(call.from, seed, call.scores.entries, call.scores.data);
}

void encode_signs(nb::handle values, nb::handle bits, nb::handle scales, bool two_sided, int threads, bool portable) {
    const int checked = checked_threads(threads);
    const SignCall call(cpu, values, bits, scales, two_sided, Access::write);
    const GilReleased released(call.values.entries);
    sign_encode(call.values.data, call.values.entries, call.code, checked, chosen_path(portable));
}

void add_signs(nb::handle bits, nb::handle scales, nb::handle out, bool two_sided, int threads, bool portable) {
    const int checked = checked_threads(threads);
    const SignCall call(cpu, out, bits, scales, two_sided, Access::read);
    const GilReleased released(call.values.entries);
    sign_add(call.code, call.values.data, call.values.entries, checked, chosen_path(portable));
}

}  // namespace

void bind_sparse(nb::module_& m) {
    define<Select<threshold_block, double>>(m, "threshold_block", "threshold"_a);
    define<Select<topk_block>>(m, "topk_block");
    define<Select<random_block, std::uint64_t>>(m, "random_block", "seed"_a);
    m.def("sample_scores", fill_sample_scores, "gradient"_a.none(), "residual"_a.none(), "weight"_a, "seed"_a,
          "scores"_a.none());
    m.def("sign_encode", encode_signs, "values"_a.none(), "bits"_a.none(), "scales"_a.none(), "two_sided"_a,
          "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("sign_add", add_signs, "bits"_a.none(), "scales"_a.none(), "out"_a.none(), "two_sided"_a, "threads"_a = 0,
          nb::kw_only(), "portable"_a = false);
}

}  // namespace atoll_kernels
