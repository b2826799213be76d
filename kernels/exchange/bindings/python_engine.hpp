#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
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

using namespace nb::literals;

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

inline Settings checked_settings(int rank, std::vector<std::vector<int>> islands, int threads,
                                 const std::string& values, const std::string& selection, std::int64_t digest_every,
                                 std::uint64_t seed, std::int64_t first_round) {
    if (threads < 1 || threads > max_threads)
        refuse("threads = " + std::to_string(threads) + " is not in 1.." + std::to_string(max_threads));
    return {.rank = rank,
            .islands = std::move(islands),
            .threads = threads,
            .values = wire_values_named(values, "values"),
            .selection = format_named<SelectionRule>(selection, "selection",
                                                     {{"threshold", SelectionRule::threshold},
                                                      {"topk", SelectionRule::topk},
                                                      {"random", SelectionRule::random}}),
            .digest_every = checked_natural(digest_every, "digest_every"),
            .seed = seed,
            .first_round = checked_small(first_round, "first_round")};
}

// What both engines are for Python: keeps the buffers alive, and knows the process it belongs to.
class PythonEngine {
  public:
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

    void await_compressed(double deadline_s, const std::vector<std::size_t>& tensors) {
        ExchangeEngine& engine = core();
        const auto compressed = [&](Clock::time_point until) { return engine.await_compressed(tensors, until); };
        if (wait_for(deadline_s, compressed)) return;
        throw DeadlinePassed("parts are still being selected after " + std::to_string(deadline_s) +
                             " s; allow more time, or resume what is quiesced");
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

    void await_snapshot(const std::vector<std::size_t>& tensors, std::int64_t sync_round, double deadline_s) {
        ExchangeEngine& engine = core();
        const auto captured = [&](Clock::time_point until) {
            return engine.await_snapshot(tensors, sync_round, until);
        };
        if (wait_for(deadline_s, captured)) return;
        throw DeadlinePassed("after " + std::to_string(deadline_s) + " s " + engine.waiting(tensors, sync_round));
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

    void read_shared_param(std::size_t tensor, nb::handle out_object) {
        ExchangeEngine& engine = core();
        const Loaded out = required(out_object, "out", Access::write);
        check_entries(out, engine.entries(tensor), "it must be as long as shared_param");
        const GilReleased released(always);
        engine.read_shared_param(tensor, out.data);
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
    void remember(std::size_t rounds) { core().remember(rounds); }
    std::vector<std::int64_t> versions() { return core().versions(); }
    std::uint64_t selection_seed(std::int64_t sync_round, std::size_t tensor) {
        return core().selection_seed(sync_round, tensor);
    }
    void fail(const std::string& reason) { core().fail(reason); }
    void resume() { core().resume(); }

  protected:
    explicit PythonEngine(std::unique_ptr<ExchangeEngine> core)
        : process_(getpid()), deferred_(std::make_unique<DeferredRelease>()), core_(std::move(core)) {}

    bool forked() const { return getpid() != process_; }

    ExchangeEngine& core() {
        if (forked()) {
            refuse("the engine belongs to process " + std::to_string(process_) +
                   ", which this one was forked from; make one here");
        }
        deferred_->release_all();
        return *core_;
    }

    // Checks buffers that have an entry for each of shared_param's.
    static void check_tensor(const Loaded& shared_param, std::initializer_list<const Loaded*> others) {
        for (const Loaded* buffer : others)
            check_entries(*buffer, shared_param.entries, "it must be as long as shared_param");
        if (block_count(shared_param.entries) > std::size_t{1} << 32)
            refuse("shared_param has " + number(shared_param.entries) +
                   " entries, more than indices of 32 bits reach; split it");
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

// Each adds the engine of one protocol to the module, after PythonEngine.
void bind_gradient_engine(nb::module_& m);
void bind_update_engine(nb::module_& m);

}  // namespace atoll_kernels
