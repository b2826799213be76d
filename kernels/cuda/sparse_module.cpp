#include "sparse_module.hpp"

#include "../bindings/gil.hpp"
#include "../bindings/sparse_calls.hpp"
#include "compress.hpp"
#include "device_type.hpp"
#include "scatter.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

Queue queue_of(const Loaded& buffer, std::uintptr_t stream) { return {buffer.device_id, stream_of(stream)}; }

using Threshold = Selection (*)(const Source&, float, const Chosen&, const Queue&);
using TopK = Selection (*)(const Source&, const Chosen&, const Queue&);

template <Threshold kernel, std::size_t width>
nb::tuple select_above(nb::handle gradient, nb::handle residual, double weight, double threshold, nb::handle index,
                       nb::handle values, std::uintptr_t stream) {
    const float narrow = checked_threshold(threshold);
    const SelectionCall call(cuda, gradient, residual, weight, index, values, width);
    Selection selection;
    {
        const GilReleased released(always);
        selection = kernel(call.from, narrow, call.to, queue_of(call.gradient, stream));
    }
    return as_tuple(selection);
}

template <TopK kernel, std::size_t width>
nb::tuple select_top(nb::handle gradient, nb::handle residual, double weight, nb::handle index, nb::handle values,
                     std::uintptr_t stream) {
    const SelectionCall call(cuda, gradient, residual, weight, index, values, width);
    Selection selection;
    {
        const GilReleased released(always);
        selection = kernel(call.from, call.to, queue_of(call.gradient, stream));
    }
    return as_tuple(selection);
}

nb::tuple select_random(nb::handle gradient, nb::handle residual, double weight, std::uint64_t seed, nb::handle index,
                        nb::handle values, std::uintptr_t stream) {
    const SelectionCall call(cuda, gradient, residual, weight, index, values, block_entries);
    Selection selection;
    {
        const GilReleased released(always);
        selection = random_block_cuda(call.from, seed, call.to, queue_of(call.gradient, stream));
    }
    return as_tuple(selection);
}

void fill_sample_scores(nb::handle gradient, nb::handle residual, double weight, std::uint64_t seed, nb::handle scores,
                        std::uintptr_t stream) {
    const SampleCall call(cuda, gradient, residual, weight, scores);
    const GilReleased released(always);
    sample_scores_cuda(call.from, seed, call.scores.entries, call.scores.data, queue_of(call.gradient, stream));
}

void scatter_blocks(nb::handle live_object, nb::handle index_object, nb::handle values_object, std::uintptr_t stream) {
    const Loaded live = required(live_object, "live", Access::write, live_entries, cuda);
    const Loaded index = required(index_object, "index", Access::read, index_entries, cuda);
    const Loaded values = required(values_object, "values", Access::read, float32_entries, cuda);
    check_entries(values, index.entries * block_entries, "it must hold 16 values for every index");
    check_apart({&live, &index, &values});
    const GilReleased released(always);
    scatter_blocks_cuda(live_of(live), live.entries, {index.as<std::uint32_t>(), values.data, index.entries},
                        queue_of(live, stream));
}

}  // namespace

void bind_sparse_cuda(nb::module_& m) {
    m.def("threshold_block", select_above<threshold_block_cuda, block_entries>, "gradient"_a.none(),
          "residual"_a.none(), "weight"_a, "threshold"_a, "index"_a.none(), "values"_a.none(), "stream"_a);
    m.def("threshold_element", select_above<threshold_element_cuda, 1>, "gradient"_a.none(), "residual"_a.none(),
          "weight"_a, "threshold"_a, "index"_a.none(), "values"_a.none(), "stream"_a);
    m.def("topk_block", select_top<topk_block_cuda, block_entries>, "gradient"_a.none(), "residual"_a.none(),
          "weight"_a, "index"_a.none(), "values"_a.none(), "stream"_a);
    m.def("topk_element", select_top<topk_element_cuda, 1>, "gradient"_a.none(), "residual"_a.none(), "weight"_a,
          "index"_a.none(), "values"_a.none(), "stream"_a);
    m.def("random_block", select_random, "gradient"_a.none(), "residual"_a.none(), "weight"_a, "seed"_a,
          "index"_a.none(), "values"_a.none(), "stream"_a);
    m.def("sample_scores", fill_sample_scores, "gradient"_a.none(), "residual"_a.none(), "weight"_a, "seed"_a,
          "scores"_a.none(), "stream"_a);
    m.def("scatter_blocks", scatter_blocks, "live"_a.none(), "index"_a.none(), "values"_a.none(), "stream"_a);
}

}  // namespace atoll_kernels
