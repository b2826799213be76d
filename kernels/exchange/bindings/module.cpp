#include "module.hpp"

#include "python_engine.hpp"

namespace atoll_kernels {
namespace {

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
    nb::class_<P>(m, "ExchangeEngine")
        .def("close", &P::close)
        .def("fileno", &P::fileno)
        .def("selection_seed", &P::selection_seed, "sync_round"_a, "tensor"_a)
        .def("await_compressed", &P::await_compressed, "deadline_s"_a, "tensors"_a = std::vector<std::size_t>())
        .def("snapshot", &P::snapshot, "sync_round"_a, "tensor"_a, "ranges"_a)
        .def("await_snapshot", &P::await_snapshot, "tensors"_a, "sync_round"_a, "deadline_s"_a)
        .def("remember", &P::remember, "rounds"_a)
        .def("fetch", &P::fetch, "tensors"_a, "sync_round"_a, "deadline_s"_a)
        .def("changes", &P::changes, "tensors"_a, "sync_round"_a, "deadline_s"_a)
        .def("versions", &P::versions)
        .def("read_shared_param", &P::read_shared_param, "tensor"_a, "out"_a.none())
        .def("take_outgoing", &P::take_outgoing, "limit"_a = 64)
        .def("deliver", &P::deliver, "kind"_a, "origin"_a, "sync_round"_a, "tensor"_a, "count"_a, "payload"_a.none())
        .def("fail", &P::fail, "reason"_a)
        .def("quiesce", &P::quiesce, "deadline_s"_a)
        .def("resume", &P::resume)
        .def("recent_parts", &P::recent_parts)
        .def("idle", &P::idle, "deadline_s"_a)
        .def("digests", &P::digests)
        .def("take_stats", &P::take_stats);
    bind_gradient_engine(m);
    bind_update_engine(m);
}

}  // namespace atoll_kernels
