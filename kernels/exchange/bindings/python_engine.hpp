#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../bindings/gil.hpp"
#include "../../bindings/loaded.hpp"
#include "../engine/exchange_engine.hpp"
#include "arguments.hpp"
#include "deferred_release.hpp"

namespace atoll_kernels {

struct DeadlinePassed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline constexpr std::size_t always = chunk_entries;  // so much work that the GIL is released for it

// Waits until ready(until) says true. Returns in between for Python's signal handlers: Ctrl-C ends a wait.
template <typename Ready>
bool wait_for(double deadline_s, const Ready& ready) {
    if (!(deadline_s >= 0))
        refuse("deadline_s = " + std::to_string(deadline_s) + " is not a time; pass seconds from 0 on");
    constexpr double longest_s = 1e8;
    constexpr auto slice = std::chrono::milliseconds(200);
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(std::min(deadline_s, longest_s)));
    while (true) {
        bool done;
        {
            const GilReleased released(always);
            done = ready(std::min(end, Clock::now() + slice));
        }
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (done) return true;
        if (Clock::now() >= end) return false;
    }
}

template <typename T>
nb::object as_array(std::unique_ptr<T[]> data, std::initializer_list<std::size_t> shape) {
    T* const raw = data.release();
    const nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(raw, shape, owner).cast();
}

inline nb::tuple as_arrays(Part part) {
    const std::size_t count = part.count;
    return nb::make_tuple(as_array(std::move(part.index), {count}),
                          as_array(std::move(part.values), {count, block_entries}));
}

// Blocks that a selection counted: chosen, found, not finite.
using Counted = std::tuple<std::size_t, std::size_t, std::size_t>;

// The engine as Python has it: keeps the buffers alive, and knows the process it belongs to.
class PythonEngine {
  public:
    PythonEngine(int rank, std::vector<std::vector<int>> islands, int threads, const std::string& values,
                 const std::string& selection, bool error_feedback, std::int64_t digest_every, std::uint64_t seed,
                 std::int64_t first_round, const std::string& exchange, std::int64_t every, bool replicas)
        : process_(getpid()), deferred_(std::make_unique<DeferredRelease>()) {
        if (threads < 1 || threads > max_threads)
            refuse("threads = " + std::to_string(threads) + " is not in 1.." + std::to_string(max_threads));
        if (checked_small(every, "every") == 0) refuse("every = 0 exchanges nothing; pass 1 for every round");
        core_ = std::make_unique<ExchangeEngine>(
            Settings{.rank = rank,
                     .islands = std::move(islands),
                     .threads = threads,
                     .values = wire_values_named(values, "values"),
                     .selection = format_named<SelectionRule>(selection, "selection",
                                                              {{"threshold", SelectionRule::threshold},
                                                               {"topk", SelectionRule::topk},
                                                               {"random", SelectionRule::random}}),
                     .error_feedback = error_feedback,
                     .digest_every = checked_natural(digest_every, "digest_every"),
                     .seed = seed,
                     .first_round = checked_small(first_round, "first_round"),
                     .updates = format_named<bool>(exchange, "exchange", {{"gradients", false}, {"updates", true}}),
                     .every = every,
                     .replicas = replicas});
    }
    PythonEngine(const PythonEngine&) = delete;
    PythonEngine& operator=(const PythonEngine&) = delete;

    ~PythonEngine() {
        if (forked()) {  // the threads are not here, and locks may be held by them for ever: leave all as it is
            (void)core_.release();
            (void)deferred_.release();
            return;
        }
        core_.reset();  // joins the threads, which never want the GIL; then the buffers may go
        deferred_.reset();
    }

    void close() {
        if (forked()) return;
        ExchangeEngine& engine = core();
        {
            const GilReleased released(always);
            engine.close();
        }
        deferred_->release_all();
        const GilReleased released(always);
        deferred_->wait_for_others();
    }

    std::size_t add_tensor(std::int64_t order, const std::string& rule_name, nb::handle shared_param_object,
                           nb::handle residual_object, nb::handle first_object, nb::handle second_object,
                           nb::handle last_step_object, nb::handle live_object, std::int64_t group,
                           std::int64_t turn, std::optional<std::size_t> aggregator,
                           nb::handle aggregator_sum_object) {
        ExchangeEngine& engine = core();
        const Rule rule = format_named<Rule>(
            rule_name, "rule",
            {{"sgd", Rule::sgd}, {"nesterov", Rule::nesterov}, {"adam", Rule::adam}, {"adamw", Rule::adamw}});
        Loaded shared_param = required(shared_param_object, "shared_param", Access::write);
        Loaded residual(residual_object, "residual", Access::write);
        Loaded first(first_object, "first", Access::write);
        Loaded second(second_object, "second", Access::write);
        Loaded last_step(last_step_object, "last_step", Access::write, step_entries);
        Loaded live(live_object, "live", Access::write, live_entries);
        Loaded aggregator_sum(aggregator_sum_object, "aggregator_sum", Access::write);
        const bool adaptive = rule == Rule::adam || rule == Rule::adamw;
        if ((rule != Rule::sgd && !first.given()) || (adaptive && !second.given()))
            refuse("rule '" + rule_name + "' needs its moments; pass buffers of zeros, as long as shared_param");
        if (!residual.given() && engine.feeds_back())
            refuse("residual is None, but error feedback is on; pass a buffer of zeros, as long as shared_param");
        for (const Loaded* buffer : {&residual, &first, &second, &live, &aggregator_sum})
            check_entries(*buffer, shared_param.entries, "it must be as long as shared_param");
        check_entries(last_step, block_count(shared_param.entries),
                      "it must have one entry for each block of shared_param");
        if (block_count(shared_param.entries) > std::size_t{1} << 32)
            refuse("shared_param has " + number(shared_param.entries) +
                   " entries, more than indices of 32 bits reach; split it");
        refuse_overlap({&shared_param, &residual, &first, &second, &last_step, &live, &aggregator_sum});
        const Parameters parameters{
            shared_param.data,   first.data,    adaptive ? second.data : nullptr, last_step.as<std::int32_t>(),
            live_of(live), shared_param.entries};
        const std::size_t number = engine.add_tensor({checked_small(order, "order"), rule, parameters, residual.data,
                                                      static_cast<std::size_t>(checked_natural(group, "group")), turn,
                                                      aggregator, aggregator_sum.data});
        for (Loaded* buffer : {&shared_param, &residual, &first, &second, &last_step, &live, &aggregator_sum})
            owned_.push_back(std::move(*buffer));
        return number;
    }

    void compress(std::int64_t sync_round, std::size_t tensor, nb::handle gradient_object, double weight,
                  std::int64_t k_blocks) {
        ExchangeEngine& engine = core();
        if (engine.exchanges_updates())
            refuse("this engine exchanges updates; hand over live weights with compress_live, not gradients");
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
        ExchangeEngine& engine = core();
        if (engine.exchanges_updates())
            refuse("this engine exchanges updates; hand over live weights with compress_live");
        engine.compress(sync_round, tensor, chosen_elsewhere(engine, tensor, index, values, counted));
    }

    void compress_chosen_live(std::int64_t sync_round, std::size_t tensor,
                              const std::tuple<nb::object, nb::object, Counted>& chosen, nb::handle sample_object,
                              double weight) {
        ExchangeEngine& engine = core();
        check_live_is_elsewhere(engine, tensor);
        const auto& [index, values, counted] = chosen;
        Gradient gradient = chosen_elsewhere(engine, tensor, index, values, counted);
        const Loaded sample = required(sample_object, "sample", Access::read);
        check_entries(sample, engine.drift_blocks(tensor).size() * block_entries,
                      "it must hold the blocks of drift_blocks");
        gradient.sample.assign(sample.data, sample.data + sample.entries);
        gradient.weight = checked_share(weight);
        gradient.is_live = true;
        engine.compress(sync_round, tensor, std::move(gradient));
    }

    nb::tuple take_reference(std::size_t tensor) {
        ExchangeEngine& engine = core();
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
        ExchangeEngine& engine = core();
        const std::size_t k = checked_k_blocks(k_blocks);
        std::optional<Loaded> buffer;
        const Live live = live_for(engine, tensor, live_object, buffer);
        Gradient gradient{live.data, live.format, checked_share(weight), k, {}, true};
        if (buffer.has_value()) gradient.owner = deferred_->lend(std::move(*buffer));
        engine.compress(sync_round, tensor, std::move(gradient));
    }

    void await_compressed(double deadline_s, const std::vector<std::size_t>& tensors) {
        ExchangeEngine& engine = core();
        const auto compressed = [&](Clock::time_point until) { return engine.await_compressed(tensors, until); };
        if (wait_for(deadline_s, compressed)) return;
        throw DeadlinePassed("parts are still being selected after " + std::to_string(deadline_s) +
                             " s; allow more time, or resume what is quiesced");
    }

    std::size_t read_residual(std::size_t tensor, nb::handle live_object, nb::handle out_object) {
        ExchangeEngine& engine = core();
        std::optional<Loaded> buffer;
        const Live live = live_for(engine, tensor, live_object, buffer);
        const Loaded out = required(out_object, "out", Access::write);
        check_entries(out, engine.entries(tensor), "it must be as long as shared_param");
        const GilReleased released(always);
        return engine.read_residual(tensor, live, out.data);
    }

    void read_shared_param(std::size_t tensor, nb::handle out_object) {
        ExchangeEngine& engine = core();
        const Loaded out = required(out_object, "out", Access::write);
        check_entries(out, engine.entries(tensor), "it must be as long as shared_param");
        const GilReleased released(always);
        engine.read_shared_param(tensor, out.data);
    }

    void set_live(std::size_t tensor, nb::handle residual_object, double weight, nb::handle live_object) {
        ExchangeEngine& engine = core();
        std::optional<Loaded> buffer;
        const Live live = live_for(engine, tensor, live_object, buffer, Access::write);
        const Loaded residual(residual_object, "residual", Access::write);
        check_entries(residual, engine.entries(tensor), "it must be as long as shared_param");
        if (buffer.has_value()) refuse_overlap({&*buffer, &residual});
        const float checked = checked_share(weight);
        const GilReleased released(always);
        engine.set_live(tensor, live, residual.data, checked);
    }

    void snapshot(std::int64_t sync_round, std::size_t tensor,
                  const std::vector<std::tuple<nb::object, nb::object>>& ranges) {
        ExchangeEngine& engine = core();
        std::vector<SnapshotRange> wanted;
        for (const auto& [source, into] : ranges) {
            Loaded from = required(source, "source", Access::read, byte_entries);
            Loaded to = required(into, "into", Access::write, byte_entries);
            check_entries(to, from.entries, "it must be as long as its source");
            refuse_overlap({&from, &to});
            const auto* const read = from.as<unsigned char>();
            auto* const write = to.as<unsigned char>();
            const std::size_t bytes = from.entries;
            wanted.push_back({read, write, bytes, deferred_->lend(std::move(from)), deferred_->lend(std::move(to))});
        }
        engine.snapshot(sync_round, tensor, std::move(wanted));
    }

    std::size_t snapshot_residual(std::int64_t sync_round, std::size_t tensor, nb::handle live_object,
                                  nb::handle out_object) {
        ExchangeEngine& engine = core();
        std::optional<Loaded> buffer;
        const Live live = engine.exchanges_updates() ? live_for(engine, tensor, live_object, buffer) : Live{};
        if (!engine.exchanges_updates() && !engine.feeds_back())
            refuse("without error feedback there is no residual to capture");
        Loaded out = required(out_object, "out", Access::write);
        check_entries(out, engine.entries(tensor), "it must be as long as shared_param");
        float* const data = out.data;
        std::shared_ptr<const void> owner = deferred_->lend(std::move(out));
        const GilReleased released(always);
        return engine.snapshot_residual(sync_round, tensor, live, data, std::move(owner));
    }

    void await_snapshot(const std::vector<std::size_t>& tensors, std::int64_t sync_round, double deadline_s) {
        ExchangeEngine& engine = core();
        const auto captured = [&](Clock::time_point until) {
            return engine.await_snapshot(tensors, sync_round, until);
        };
        if (wait_for(deadline_s, captured)) return;
        throw DeadlinePassed("after " + std::to_string(deadline_s) + " s " + engine.waiting(tensors, sync_round));
    }

    void apply(std::int64_t sync_round, std::int64_t number, const std::vector<Hyperparameters5>& groups,
               bool maximize, double clip_norm) {
        ExchangeEngine& engine = core();
        if (number < 1 || number > std::numeric_limits<std::int32_t>::max())
            refuse("update = " + std::to_string(number) + " is not the number of an update; the first is 1");
        OptimizerStep step{static_cast<std::int32_t>(number),
                           {},
                           maximize,
                           checked_hyperparameter(clip_norm, "clip_norm", std::numeric_limits<double>::infinity())};
        for (const Hyperparameters5& hyper : groups) step.groups.push_back(checked_parameter_group(hyper));
        engine.apply(sync_round, std::move(step));
    }

    void sum_updates(std::int64_t sync_round, double weight, const std::vector<std::int64_t>& k_blocks,
                     const std::vector<std::int64_t>& aggregator_blocks) {
        ExchangeEngine& engine = core();
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

    nb::tuple fetch(const std::vector<std::size_t>& tensors, std::int64_t sync_round, double deadline_s) {
        ExchangeEngine& engine = core();
        engine.check_fetchable(tensors, true);
        const double waited_s = await(engine, tensors, sync_round, deadline_s);
        Fetched fetched;
        {
            const GilReleased released(always);
            fetched = engine.publish(tensors, sync_round);
        }
        return nb::make_tuple(fetched.version, fetched.fresh, waited_s);
    }

    nb::tuple changes(const std::vector<std::size_t>& tensors, std::int64_t sync_round, double deadline_s) {
        ExchangeEngine& engine = core();
        engine.check_fetchable(tensors, false);
        const double waited_s = await(engine, tensors, sync_round, deadline_s);
        std::vector<Change> taken;
        {
            const GilReleased released(always);
            taken = engine.take_changes(tensors);
        }
        nb::list rows;
        for (Change& change : taken) {
            const nb::tuple arrays = as_arrays(std::move(change.part));
            rows.append(nb::make_tuple(change.version, arrays[0], arrays[1]));
        }
        return nb::make_tuple(waited_s, rows);
    }

    nb::list take_outgoing(std::size_t limit) {
        nb::list rows;
        for (const Outgoing& message : core().take_outgoing(limit)) {
            const nb::bytes payload(message.payload->data.get(), message.payload->bytes);
            rows.append(nb::make_tuple(static_cast<int>(message.kind), message.urgency.sync_round, message.tensor,
                                       message.urgency.order, message.count, payload, message.to));
        }
        return rows;
    }

    nb::object deliver(int kind, std::uint64_t origin, std::uint64_t sync_round, std::uint64_t tensor,
                       std::uint64_t count, nb::handle payload_object) {
        ExchangeEngine& engine = core();
        const auto sent = static_cast<MessageKind>(kind);
        if (sent != MessageKind::part && sent != MessageKind::sum && sent != MessageKind::to_aggregator &&
            sent != MessageKind::from_aggregator)
            refuse("kind = " + std::to_string(kind) +
                   " is none of 0 (part), 1 (sum), 7 (to aggregator) and 8 (from aggregator)");
        const Loaded payload = required(payload_object, "payload", Access::read, byte_entries);
        const char* why;
        {
            const GilReleased released(payload.entries);
            why = engine.deliver(sent, origin, sync_round, tensor, count,
                                 payload.as<unsigned char>(), payload.entries);
        }
        return why == nullptr ? nb::none() : nb::object(nb::str(why));
    }

    void quiesce(double deadline_s) {
        ExchangeEngine& engine = core();
        if (wait_for(deadline_s, [&](Clock::time_point until) { return engine.quiesce(until); })) return;
        engine.resume();
        throw DeadlinePassed("the running tasks did not end within " + std::to_string(deadline_s) +
                             " s; allow more time");
    }

    void idle(double deadline_s) {
        ExchangeEngine& engine = core();
        if (wait_for(deadline_s, [&](Clock::time_point until) { return engine.idle(until); })) return;
        throw DeadlinePassed("tasks are still queued or running after " + std::to_string(deadline_s) +
                             " s; allow more time, or resume what is quiesced");
    }

    nb::list recent_parts() {
        ExchangeEngine& engine = core();
        std::vector<OwnPart> parts;
        {
            const GilReleased released(always);
            parts = engine.recent_parts();
        }
        nb::list rows;
        for (OwnPart& own : parts) {
            const nb::tuple arrays = as_arrays(std::move(own.part));
            rows.append(nb::make_tuple(static_cast<int>(own.kind), own.sync_round, own.tensor, arrays[0], arrays[1]));
        }
        return rows;
    }

    nb::list digests() {
        nb::list rows;
        for (const Digest& digest : core().take_digests())
            rows.append(nb::make_tuple(digest.sync_round, digest.tensor, digest.value));
        return rows;
    }

    nb::tuple take_stats() {
        const Stats s = core().take_stats();
        return nb::make_tuple(s.queue.tasks, s.queue.queue_s, s.compress_s, s.sum_s, s.update_s, s.publish_s,
                              s.chosen_blocks, s.found_blocks, s.all_blocks, s.nonfinite_blocks, s.payload_bytes,
                              s.stall_s, s.drift.outstanding, s.drift.update, s.rounds, s.rounds_s);
    }

    int fileno() { return core().event(); }
    void accumulate(std::int64_t sync_round) { core().accumulate(sync_round); }
    void remember(std::size_t rounds) { core().remember(rounds); }
    std::vector<std::int64_t> versions() { return core().versions(); }
    std::uint64_t selection_seed(std::int64_t sync_round, std::size_t tensor) {
        return core().selection_seed(sync_round, tensor);
    }
    void fail(const std::string& reason) { core().fail(reason); }
    void resume() { core().resume(); }

  private:
    bool forked() const { return getpid() != process_; }

    ExchangeEngine& core() {
        if (forked()) {
            refuse("the engine belongs to process " + std::to_string(process_) +
                   ", which this one was forked from; make one here");
        }
        deferred_->release_all();
        return *core_;
    }

    static void check_follows_live(const ExchangeEngine& engine) {
        if (!engine.exchanges_updates()) refuse("this engine exchanges gradients; it does not follow live weights");
    }

    static void check_live_is_elsewhere(const ExchangeEngine& engine, std::size_t tensor) {
        check_follows_live(engine);
        if (engine.live(tensor).data != nullptr)
            refuse("the tensor was added with its live weights; call compress_live");
    }

    // Blocks that a selection on a device wrote.
    static Gradient chosen_elsewhere(const ExchangeEngine& engine, std::size_t tensor, nb::handle index_object,
                                     nb::handle values_object, const Counted& counted) {
        const Loaded index = required(index_object, "index", Access::read, index_entries);
        const Loaded values = required(values_object, "values", Access::read);
        check_entries(values, index.entries * block_entries, "it must hold 16 values for every index");
        const Units units{index.as<std::uint32_t>(), values.data, index.entries};
        const std::size_t blocks = block_count(engine.entries(tensor));
        for (std::size_t k = 0; k < units.count; ++k) {
            if (units.index[k] < blocks && (k == 0 || units.index[k - 1] < units.index[k])) continue;
            refuse("index does not ascend, or reaches beyond the last of " + number(blocks) +
                   "; pass what a selection wrote");
        }
        Gradient gradient{nullptr, ValueFormat::float32, 0, 1, {}};
        gradient.chosen = copied(units);
        gradient.selection = {units.count, std::get<1>(counted), std::get<2>(counted)};
        return gradient;
    }

    // The tensor's own live buffer, or one handed over for it, which `buffer` keeps alive.
    static Live live_for(ExchangeEngine& engine, std::size_t tensor, nb::handle object, std::optional<Loaded>& buffer,
                         Access access = Access::read) {
        check_follows_live(engine);
        const Live live = engine.live(tensor);
        if (object.is_none() && live.data == nullptr)
            refuse("live is None, and the tensor was added without one; pass its present weights");
        if (!object.is_none() && live.data != nullptr) refuse("the tensor was added with its live weights; pass None");
        if (object.is_none()) return live;
        buffer.emplace(required(object, "live", access, live_entries));
        check_entries(*buffer, engine.entries(tensor), "it must be as long as shared_param");
        return live_of(*buffer);
    }

    // Returns how many seconds it took.
    double await(ExchangeEngine& engine, const std::vector<std::size_t>& tensors, std::int64_t sync_round,
                 double deadline_s) {
        const Clock::time_point begun = Clock::now();
        const bool there =
            wait_for(deadline_s, [&](Clock::time_point until) { return engine.await(tensors, sync_round, until); });
        const Clock::duration waited = Clock::now() - begun;
        engine.note_stall(waited);
        if (!there) {
            char spent[32];
            std::snprintf(spent, sizeof spent, "%.1f", deadline_s);
            throw DeadlinePassed("after " + std::string(spent) + " s " + engine.waiting(tensors, sync_round));
        }
        return seconds(waited);
    }

    const pid_t process_;
    std::vector<Loaded> owned_;
    std::unique_ptr<DeferredRelease> deferred_;
    std::unique_ptr<ExchangeEngine> core_;
};

}  // namespace atoll_kernels
