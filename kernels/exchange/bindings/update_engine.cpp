#include "../engine/update_engine.hpp"
#include "python_engine.hpp"

namespace atoll_kernels {
namespace {

std::int64_t checked_every(std::int64_t every) {
    if (checked_small(every, "every") == 0) refuse("every = 0 exchanges nothing; pass 1 for every round");
    return every;
}

class PythonUpdateEngine : public PythonEngine {
  public:
    PythonUpdateEngine(int rank, std::vector<std::vector<int>> islands, int threads, const std::string& values,
                       const std::string& selection, std::int64_t digest_every, std::uint64_t seed,
                       std::int64_t first_round, std::int64_t every, bool replicas)
        : PythonEngine(std::make_unique<UpdateEngine>(
              checked_settings(rank, std::move(islands), threads, values, selection, digest_every, seed, first_round),
              checked_every(every), replicas)) {}

    std::size_t add_tensor(std::int64_t order, nb::handle shared_param_object, nb::handle live_object,
                           std::int64_t turn, std::optional<std::size_t> aggregator,
                           nb::handle aggregator_sum_object) {
        UpdateEngine& engine = core();
        Loaded shared_param = required(shared_param_object, "shared_param", Access::write);
        Loaded live(live_object, "live", Access::write, live_entries);
        Loaded aggregator_sum(aggregator_sum_object, "aggregator_sum", Access::write);
        check_tensor(shared_param, {&live, &aggregator_sum});
        refuse_overlap({&shared_param, &live, &aggregator_sum});
        const Parameters parameters{shared_param.data, nullptr, nullptr, nullptr, live_of(live), shared_param.entries};
        const std::size_t number = engine.add_tensor({checked_small(order, "order"), Rule::sgd, parameters, nullptr, 0,
                                                      turn, aggregator, aggregator_sum.data});
        for (Loaded* buffer : {&shared_param, &live, &aggregator_sum}) owned_.push_back(std::move(*buffer));
        return number;
    }

    void compress_chosen_live(std::int64_t sync_round, std::size_t tensor,
                              const std::tuple<nb::object, nb::object, Counted>& chosen, nb::handle sample_object,
                              double weight) {
        UpdateEngine& engine = core();
        check_live_is_elsewhere(engine, tensor);
        const auto& [index, values, counted] = chosen;
        Gradient gradient = chosen_elsewhere(engine, tensor, index, values, counted);
        const Loaded sample = required(sample_object, "sample", Access::read);
        check_entries(sample, engine.drift_blocks(tensor).size() * block_entries,
                      "it must hold the blocks of drift_blocks");
        gradient.sample.assign(sample.data, sample.data + sample.entries);
        gradient.weight = checked_share(weight);
        engine.compress_live(sync_round, tensor, std::move(gradient));
    }

    nb::tuple take_reference(std::size_t tensor) {
        UpdateEngine& engine = core();
        check_live_is_elsewhere(engine, tensor);
        Part reference;
        {
            const GilReleased released(always);
            reference = engine.take_reference(tensor);
        }
        return as_arrays(std::move(reference));
    }

    nb::tuple drift_blocks(std::size_t tensor) {
        const std::vector<std::uint32_t>& blocks = core().drift_blocks(tensor);
        nb::list listed;
        for (const std::uint32_t block : blocks) listed.append(block);
        return nb::tuple(listed);
    }

    void compress_live(std::int64_t sync_round, std::size_t tensor, nb::handle live_object, double weight,
                       std::int64_t k_blocks) {
        UpdateEngine& engine = core();
        const std::size_t k = checked_k_blocks(k_blocks);
        std::optional<Loaded> buffer;
        const Live live = live_for(engine, tensor, live_object, buffer);
        Gradient gradient{live.data, live.format, checked_share(weight), k, {}};
        if (buffer.has_value()) gradient.owner = deferred_->lend(std::move(*buffer));
        engine.compress_live(sync_round, tensor, std::move(gradient));
    }

    std::size_t read_residual(std::size_t tensor, nb::handle live_object, nb::handle out_object) {
        UpdateEngine& engine = core();
        std::optional<Loaded> buffer;
        const Live live = live_for(engine, tensor, live_object, buffer);
        const Loaded out = required(out_object, "out", Access::write);
        check_entries(out, engine.entries(tensor), "it must be as long as shared_param");
        const GilReleased released(always);
        return engine.read_residual(tensor, live, out.data);
    }

    void set_live(std::size_t tensor, nb::handle residual_object, double weight, nb::handle live_object) {
        UpdateEngine& engine = core();
        std::optional<Loaded> buffer;
        const Live live = live_for(engine, tensor, live_object, buffer, Access::write);
        const Loaded residual(residual_object, "residual", Access::write);
        check_entries(residual, engine.entries(tensor), "it must be as long as shared_param");
        if (buffer.has_value()) refuse_overlap({&*buffer, &residual});
        const float checked = checked_share(weight);
        const GilReleased released(always);
        engine.set_live(tensor, live, residual.data, checked);
    }

    std::size_t snapshot_residual(std::int64_t sync_round, std::size_t tensor, nb::handle live_object,
                                  nb::handle out_object) {
        UpdateEngine& engine = core();
        std::optional<Loaded> buffer;
        const Live live = live_for(engine, tensor, live_object, buffer);
        Loaded out = required(out_object, "out", Access::write);
        check_entries(out, engine.entries(tensor), "it must be as long as shared_param");
        float* const data = out.data;
        std::shared_ptr<const void> owner = deferred_->lend(std::move(out));
        const GilReleased released(always);
        return engine.snapshot_residual(sync_round, tensor, live, data, std::move(owner));
    }

    void sum_updates(std::int64_t sync_round, double weight, const std::vector<std::int64_t>& k_blocks,
                     const std::vector<std::int64_t>& aggregator_blocks) {
        UpdateEngine& engine = core();
        const auto checked = [](const std::vector<std::int64_t>& blocks) {
            std::vector<std::size_t> all;
            all.reserve(blocks.size());
            for (const std::int64_t k : blocks) all.push_back(checked_k_blocks(k));
            return all;
        };
        engine.sum_updates(sync_round, checked_share(weight), checked(k_blocks),
                           checked(aggregator_blocks.empty() ? k_blocks : aggregator_blocks));
    }

    void change_turns(std::int64_t sync_round, std::int64_t every, const std::vector<std::int64_t>& turns) {
        core().change_turns(sync_round, checked_small(every, "every"), turns);
    }

  private:
    UpdateEngine& core() { return static_cast<UpdateEngine&>(PythonEngine::core()); }

    static void check_live_is_elsewhere(const UpdateEngine& engine, std::size_t tensor) {
        if (engine.live(tensor).data != nullptr)
            refuse("the tensor was added with its live weights; call compress_live");
    }

    // The tensor's own live buffer, or one handed over for it, which `buffer` keeps alive.
    static Live live_for(UpdateEngine& engine, std::size_t tensor, nb::handle object, std::optional<Loaded>& buffer,
                         Access access = Access::read) {
        const Live live = engine.live(tensor);
        if (object.is_none() && live.data == nullptr)
            refuse("live is None, and the tensor was added without one; pass its present weights");
        if (!object.is_none() && live.data != nullptr) refuse("the tensor was added with its live weights; pass None");
        if (object.is_none()) return live;
        buffer.emplace(required(object, "live", access, live_entries));
        check_entries(*buffer, engine.entries(tensor), "it must be as long as shared_param");
        return live_of(*buffer);
    }
};

}  // namespace

void bind_update_engine(nb::module_& m) {
    using P = PythonUpdateEngine;
    const nb::object none = nb::none();
    nb::class_<P, PythonEngine>(m, "UpdateEngine")
        .def(nb::init<int, std::vector<std::vector<int>>, int, const std::string&, const std::string&, std::int64_t,
                      std::uint64_t, std::int64_t, std::int64_t, bool>(),
             nb::kw_only(), "rank"_a, "islands"_a, "threads"_a = 1, "values"_a = "float16",
             "selection"_a = "threshold", "digest_every"_a = 0, "seed"_a = 0, "first_round"_a = 0, "every"_a = 1,
             "replicas"_a = false)
        .def("add_tensor", &P::add_tensor, nb::kw_only(), "order"_a, "shared_param"_a.none(), "live"_a.none() = none,
             "turn"_a = 0, "aggregator"_a = none, "aggregator_sum"_a.none() = none)
        .def("compress_chosen_live", &P::compress_chosen_live, "sync_round"_a, "tensor"_a, "chosen"_a,
             "sample"_a.none(), "weight"_a)
        .def("take_reference", &P::take_reference, "tensor"_a)
        .def("drift_blocks", &P::drift_blocks, "tensor"_a)
        .def("compress_live", &P::compress_live, "sync_round"_a, "tensor"_a, "live"_a.none(), "weight"_a,
             "k_blocks"_a)
        .def("read_residual", &P::read_residual, "tensor"_a, "live"_a.none(), "out"_a.none())
        .def("set_live", &P::set_live, "tensor"_a, "residual"_a.none(), "weight"_a, "live"_a.none())
        .def("snapshot_residual", &P::snapshot_residual, "sync_round"_a, "tensor"_a, "live"_a.none(), "out"_a.none())
        .def("sum_updates", &P::sum_updates, "sync_round"_a, "weight"_a, "k_blocks"_a,
             "aggregator_blocks"_a = std::vector<std::int64_t>())
        .def("change_turns", &P::change_turns, "sync_round"_a, "every"_a, "turns"_a);
}

}  // namespace atoll_kernels
