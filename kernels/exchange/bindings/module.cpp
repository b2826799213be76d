#include "module.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python_engine.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const PeerIsLost& error) {
        PyErr_SetString(PyExc_ConnectionError, error.what());
    } catch (const DeadlinePassed& error) {
        PyErr_SetString(PyExc_TimeoutError, error.what());
    }
}

double start_threshold(ThresholdController& controller, nb::handle scores_object, std::size_t blocks) {
    const Loaded scores = required(scores_object, "scores", Access::read);
    return controller.start(scores.data, scores.entries, blocks);
}

}  // namespace

void bind_exchange_engine(nb::module_& m) {
    nb::register_exception_translator(translate);
    nb::class_<ThresholdController>(m, "ThresholdController")
        .def(nb::init<std::size_t>(), "target"_a)
        .def_prop_ro("threshold", &ThresholdController::threshold)
        .def_prop_ro("needs_sample", &ThresholdController::needs_sample)
        .def("aim_at", &ThresholdController::aim_at, "target"_a)
        .def("start", start_threshold, "scores"_a, "blocks"_a)
        .def("update", &ThresholdController::update, "found"_a);
    using P = PythonEngine;
    const nb::object none = nb::none();
    nb::class_<P>(m, "ExchangeEngine")
        .def(nb::init<int, std::vector<std::vector<int>>, int, const std::string&, const std::string&, bool,
                      std::int64_t, std::uint64_t, std::int64_t, const std::string&, std::int64_t, bool>(),
             nb::kw_only(), "rank"_a, "islands"_a, "threads"_a = 1, "values"_a = "float16",
             "selection"_a = "threshold", "error_feedback"_a = true, "digest_every"_a = 0, "seed"_a = 0,
             "first_round"_a = 0, "exchange"_a = "gradients", "every"_a = 1, "replicas"_a = false)
        .def("add_tensor", &P::add_tensor, nb::kw_only(), "order"_a, "rule"_a, "shared_param"_a.none(),
             "residual"_a.none(), "first"_a.none() = none, "second"_a.none() = none,
             "last_step"_a.none() = none, "live"_a.none() = none, "group"_a = 0, "turn"_a = 0,
             "aggregator"_a = none, "aggregator_sum"_a.none() = none)
        .def("close", &P::close)
        .def("fileno", &P::fileno)
        .def("compress", &P::compress, "sync_round"_a, "tensor"_a, "gradient"_a.none(), "weight"_a, "k_blocks"_a)
        .def("compress_chosen", &P::compress_chosen, "sync_round"_a, "tensor"_a, "index"_a.none(), "values"_a.none(),
             "counted"_a)
        .def("compress_chosen_live", &P::compress_chosen_live, "sync_round"_a, "tensor"_a, "chosen"_a,
             "sample"_a.none(), "weight"_a)
        .def("take_reference", &P::take_reference, "tensor"_a)
        .def("drift_blocks", &P::drift_blocks, "tensor"_a)
        .def("selection_seed", &P::selection_seed, "sync_round"_a, "tensor"_a)
        .def("compress_live", &P::compress_live, "sync_round"_a, "tensor"_a, "live"_a.none(), "weight"_a,
             "k_blocks"_a)
        .def("await_compressed", &P::await_compressed, "deadline_s"_a, "tensors"_a = std::vector<std::size_t>())
        .def("read_residual", &P::read_residual, "tensor"_a, "live"_a.none(), "out"_a.none())
        .def("read_shared_param", &P::read_shared_param, "tensor"_a, "out"_a.none())
        .def("set_live", &P::set_live, "tensor"_a, "residual"_a.none(), "weight"_a, "live"_a.none())
        .def("apply", &P::apply, "sync_round"_a, "update"_a, "groups"_a, nb::kw_only(), "maximize"_a = false,
             "clip_norm"_a = 0.0)
        .def("snapshot", &P::snapshot, "sync_round"_a, "tensor"_a, "ranges"_a)
        .def("snapshot_residual", &P::snapshot_residual, "sync_round"_a, "tensor"_a, "live"_a.none(), "out"_a.none())
        .def("await_snapshot", &P::await_snapshot, "tensors"_a, "sync_round"_a, "deadline_s"_a)
        .def("accumulate", &P::accumulate, "sync_round"_a)
        .def("sum_updates", &P::sum_updates, "sync_round"_a, "weight"_a, "k_blocks"_a,
             "aggregator_blocks"_a = std::vector<std::int64_t>())
        .def("change_turns", &P::change_turns, "sync_round"_a, "every"_a, "turns"_a)
        .def("remember", &P::remember, "rounds"_a)
        .def("fetch", &P::fetch, "tensors"_a, "sync_round"_a, "deadline_s"_a)
        .def("changes", &P::changes, "tensors"_a, "sync_round"_a, "deadline_s"_a)
        .def("versions", &P::versions)
        .def("take_outgoing", &P::take_outgoing, "limit"_a = 64)
        .def("deliver", &P::deliver, "kind"_a, "origin"_a, "sync_round"_a, "tensor"_a, "count"_a, "payload"_a.none())
        .def("fail", &P::fail, "reason"_a)
        .def("quiesce", &P::quiesce, "deadline_s"_a)
        .def("resume", &P::resume)
        .def("recent_parts", &P::recent_parts)
        .def("idle", &P::idle, "deadline_s"_a)
        .def("digests", &P::digests)
        .def("take_stats", &P::take_stats);
}

}  // namespace atoll_kernels
