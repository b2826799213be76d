#include "../engine/gradient_engine.hpp"
#include "python_engine.hpp"

namespace atoll_kernels {
namespace {

class PythonGradientEngine : public PythonEngine {
  public:
    PythonGradientEngine(int rank, std::vector<std::vector<int>> islands, int threads, const std::string& values,
                         const std::string& selection, std::int64_t digest_every, std::uint64_t seed,
                         std::int64_t first_round, bool error_feedback)
        : PythonEngine(std::make_unique<GradientEngine>(
              checked_settings(rank, std::move(islands), threads, values, selection, digest_every, seed, first_round),
              error_feedback)) {}

    std::size_t add_tensor(std::int64_t order, const std::string& rule_name, nb::handle shared_param_object,
                           nb::handle residual_object, nb::handle first_object, nb::handle second_object,
                           nb::handle last_step_object, nb::handle live_object, std::int64_t group) {
        GradientEngine& engine = core();
        const Rule rule = format_named<Rule>(
            rule_name, "rule",
            {{"sgd", Rule::sgd}, {"nesterov", Rule::nesterov}, {"adam", Rule::adam}, {"adamw", Rule::adamw}});
        Loaded shared_param = required(shared_param_object, "shared_param", Access::write);
        Loaded residual(residual_object, "residual", Access::write);
        Loaded first(first_object, "first", Access::write);
        Loaded second(second_object, "second", Access::write);
        Loaded last_step(last_step_object, "last_step", Access::write, step_entries);
        Loaded live(live_object, "live", Access::write, live_entries);
        const bool adaptive = rule == Rule::adam || rule == Rule::adamw;
        if ((rule != Rule::sgd && !first.given()) || (adaptive && !second.given()))
            refuse("rule '" + rule_name + "' needs its moments; pass buffers of zeros, as long as shared_param");
        if (!residual.given() && engine.feeds_back())
            refuse("residual is None, but error feedback is on; pass a buffer of zeros, as long as shared_param");
        check_tensor(shared_param, {&residual, &first, &second, &live});
        check_entries(last_step, block_count(shared_param.entries),
                      "it must have one entry for each block of shared_param");
        refuse_overlap({&shared_param, &residual, &first, &second, &last_step, &live});
        const Parameters parameters{
            shared_param.data,   first.data,    adaptive ? second.data : nullptr, last_step.as<std::int32_t>(),
            live_of(live), shared_param.entries};
        const std::size_t number = engine.add_tensor({checked_small(order, "order"), rule, parameters, residual.data,
                                                      static_cast<std::size_t>(checked_natural(group, "group"))});
        for (Loaded* buffer : {&shared_param, &residual, &first, &second, &last_step, &live})
            owned_.push_back(std::move(*buffer));
        return number;
    }

    void compress(std::int64_t sync_round, std::size_t tensor, nb::handle gradient_object, double weight,
                  std::int64_t k_blocks) {
        GradientEngine& engine = core();
        const std::size_t k = checked_k_blocks(k_blocks);
        Gradient gradient{nullptr, ValueFormat::float32, checked_weight(weight), k, {}};
        if (gradient_object.is_none()) return engine.compress(sync_round, tensor, std::move(gradient));
        Loaded buffer = required(gradient_object, "gradient", Access::read, live_entries);
        check_entries(buffer, engine.entries(tensor), "it must be as long as shared_param");
        gradient.data = buffer.data;
        gradient.format = live_of(buffer).format;
        gradient.owner = deferred_->lend(std::move(buffer));
        engine.compress(sync_round, tensor, std::move(gradient));
    }

    void compress_chosen(std::int64_t sync_round, std::size_t tensor, nb::handle index, nb::handle values,
                         const Counted& counted) {
        GradientEngine& engine = core();
        engine.compress(sync_round, tensor, chosen_elsewhere(engine, tensor, index, values, counted));
    }

    void apply(std::int64_t sync_round, std::int64_t number, const std::vector<Hyperparameters5>& groups,
               bool maximize, double clip_norm) {
        GradientEngine& engine = core();
        if (number < 1 || number > std::numeric_limits<std::int32_t>::max())
            refuse("update = " + std::to_string(number) + " is not the number of an update; the first is 1");
        OptimizerStep step{static_cast<std::int32_t>(number),
                           {},
                           maximize,
                           checked_hyperparameter(clip_norm, "clip_norm", std::numeric_limits<double>::infinity())};
        for (const Hyperparameters5& hyper : groups) step.groups.push_back(checked_parameter_group(hyper));
        engine.apply(sync_round, std::move(step));
    }

    void accumulate(std::int64_t sync_round) { core().accumulate(sync_round); }

    void snapshot_residual(std::int64_t sync_round, std::size_t tensor, nb::handle out_object) {
        GradientEngine& engine = core();
        if (!engine.feeds_back()) refuse("without error feedback there is no residual to capture");
        Loaded out = required(out_object, "out", Access::write);
        check_entries(out, engine.entries(tensor), "it must be as long as shared_param");
        float* const data = out.data;
        std::shared_ptr<const void> owner = deferred_->lend(std::move(out));
        const GilReleased released(always);
        engine.snapshot_residual(sync_round, tensor, data, std::move(owner));
    }

  private:
    GradientEngine& core() { return static_cast<GradientEngine&>(PythonEngine::core()); }
};

}  // namespace

void bind_gradient_engine(nb::module_& m) {
    using P = PythonGradientEngine;
    const nb::object none = nb::none();
    nb::class_<P, PythonEngine>(m, "GradientEngine")
        .def(nb::init<int, std::vector<std::vector<int>>, int, const std::string&, const std::string&, std::int64_t,
                      std::uint64_t, std::int64_t, bool>(),
             nb::kw_only(), "rank"_a, "islands"_a, "threads"_a = 1, "values"_a = "float16",
             "selection"_a = "threshold", "digest_every"_a = 0, "seed"_a = 0, "first_round"_a = 0,
             "error_feedback"_a = true)
        .def("add_tensor", &P::add_tensor, nb::kw_only(), "order"_a, "rule"_a, "shared_param"_a.none(),
             "residual"_a.none(), "first"_a.none() = none, "second"_a.none() = none,
             "last_step"_a.none() = none, "live"_a.none() = none, "group"_a = 0)
        .def("compress", &P::compress, "sync_round"_a, "tensor"_a, "gradient"_a.none(), "weight"_a, "k_blocks"_a)
        .def("compress_chosen", &P::compress_chosen, "sync_round"_a, "tensor"_a, "index"_a.none(), "values"_a.none(),
             "counted"_a)
        .def("apply", &P::apply, "sync_round"_a, "update"_a, "groups"_a, nb::kw_only(), "maximize"_a = false,
             "clip_norm"_a = 0.0)
        .def("accumulate", &P::accumulate, "sync_round"_a)
        .def("snapshot_residual", &P::snapshot_residual, "sync_round"_a, "tensor"_a, "out"_a.none());
}

}  // namespace atoll_kernels
