#include "sparse_module.hpp"

#include <cstdint>

#include "../../bindings/gil.hpp"
#include "../../bindings/sparse_calls.hpp"
#include "../select/compress.hpp"
#include "call_options.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

using Threshold = Selection (*)(const Source&, float, const Chosen&, int, Path);
using TopK = Selection (*)(const Source&, const Chosen&, int, Path);

template <Threshold kernel, std::size_t width>
nb::tuple select_above(nb::handle gradient, nb::handle residual, double weight, double threshold, nb::handle index,
                       nb::handle values, int threads, bool portable) {
    const int checked = checked_threads(threads);
    const float narrow = checked_threshold(threshold);
    const SelectionCall call(cpu, gradient, residual, weight, index, values, width);
    Selection selection;
    {
        const GilReleased released(call.from.n);
        selection = kernel(call.from, narrow, call.to, checked, chosen_path(portable));
    }
    return as_tuple(selection);
}

template <TopK kernel, std::size_t width>
nb::tuple select_top(nb::handle gradient, nb::handle residual, double weight, nb::handle index, nb::handle values,
                     int threads, bool portable) {
    const int checked = checked_threads(threads);
    const SelectionCall call(cpu, gradient, residual, weight, index, values, width);
    Selection selection;
    {
        const GilReleased released(call.from.n);
        selection = kernel(call.from, call.to, checked, chosen_path(portable));
    }
    return as_tuple(selection);
}

nb::tuple select_random(nb::handle gradient, nb::handle residual, double weight, std::uint64_t seed, nb::handle index,
                        nb::handle values, int threads, bool portable) {
    const int checked = checked_threads(threads);
    const SelectionCall call(cpu, gradient, residual, weight, index, values, block_entries);
    Selection selection;
    {
        const GilReleased released(call.from.n);
        selection = random_block(call.from, seed, call.to, checked, chosen_path(portable));
    }
    return as_tuple(selection);
}

void fill_sample_scores(nb::handle gradient, nb::handle residual, double weight, std::uint64_t seed,
                        nb::handle scores) {
    const SampleCall call(cpu, gradient, residual, weight, scores);
    const GilReleased released(call.scores.entries * block_entries);
    sample_scores(call.from, seed, call.scores.entries, call.scores.data);
}

}  // namespace

void bind_sparse(nb::module_& m) {
    m.def("threshold_block", select_above<threshold_block, block_entries>, "gradient"_a.none(), "residual"_a.none(),
          "weight"_a, "threshold"_a, "index"_a.none(), "values"_a.none(), "threads"_a = 0, nb::kw_only(),
          "portable"_a = false);
    m.def("threshold_element", select_above<threshold_element, 1>, "gradient"_a.none(), "residual"_a.none(), "weight"_a,
          "threshold"_a, "index"_a.none(), "values"_a.none(), "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("topk_block", select_top<topk_block, block_entries>, "gradient"_a.none(), "residual"_a.none(), "weight"_a,
          "index"_a.none(), "values"_a.none(), "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("topk_element", select_top<topk_element, 1>, "gradient"_a.none(), "residual"_a.none(), "weight"_a,
          "index"_a.none(), "values"_a.none(), "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("random_block", select_random, "gradient"_a.none(), "residual"_a.none(), "weight"_a, "seed"_a,
          "index"_a.none(), "values"_a.none(), "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("sample_scores", fill_sample_scores, "gradient"_a.none(), "residual"_a.none(), "weight"_a, "seed"_a,
          "scores"_a.none());
}

}  // namespace atoll_kernels
