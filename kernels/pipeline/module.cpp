#include "module.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <tuple>

#include "../cpu/thread_pool.hpp"
#include "../gil.hpp"
#include "../loaded.hpp"
#include "graveyard.hpp"
#include "pipeline.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

using Rates5 = std::tuple<double, double, double, double, double>;

constexpr std::size_t always = chunk_entries;  // so much work that the GIL is released for it

struct DeadlinePassed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

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

nb::tuple as_arrays(Part part) {
    const std::size_t count = part.count;
    return nb::make_tuple(as_array(std::move(part.index), {count}),
                          as_array(std::move(part.values), {count, block_entries}));
}

std::int64_t checked_natural(std::int64_t value, const char* name) {
    if (value < 0) refuse(std::string(name) + " = " + std::to_string(value) + " is negative; pass 0 or more");
    return value;
}

// Small enough that nothing added to it overflows.
std::int64_t checked_small(std::int64_t value, const char* name) {
    if (checked_natural(value, name) >> 62 != 0)
        refuse(std::string(name) + " = " + std::to_string(value) + " is too large; pass less than 2^62");
    return value;
}

Settings checked_settings(int rank, std::vector<std::vector<int>> islands, int threads, const std::string& policy,
                          const std::string& values, const std::string& selection, bool error_feedback,
                          std::int64_t digest_every, std::uint64_t seed, std::int64_t first_step,
                          const std::string& exchange) {
    if (threads < 1 || threads > max_threads)
        refuse("threads = " + std::to_string(threads) + " is not in 1.." + std::to_string(max_threads));
    return {.rank = rank,
            .islands = std::move(islands),
            .threads = threads,
            .policy = format_named<Policy>(policy, "policy", {{"edf", Policy::edf}, {"fcfs", Policy::fcfs}}),
            .values = format_named<ValueFormat>(values, "values",
                                                {{"float32", ValueFormat::float32},
                                                 {"float16", ValueFormat::float16},
                                                 {"bfloat16", ValueFormat::bfloat16}}),
            .selection = format_named<SelectionRule>(selection, "selection",
                                                     {{"threshold", SelectionRule::threshold},
                                                      {"topk", SelectionRule::topk},
                                                      {"random", SelectionRule::random}}),
            .error_feedback = error_feedback,
            .digest_every = checked_natural(digest_every, "digest_every"),
            .seed = seed,
            .first_step = checked_small(first_step, "first_step"),
            .updates = format_named<bool>(exchange, "exchange", {{"gradients", false}, {"updates", true}})};
}

std::size_t checked_keep(std::int64_t keep_blocks) {
    if (keep_blocks < 1) refuse("keep_blocks = " + std::to_string(keep_blocks) + " sends nothing; pass 1 or more");
    return static_cast<std::size_t>(keep_blocks);
}

Group checked_group(const Rates5& rates) {
    const double infinity = std::numeric_limits<double>::infinity();
    const auto& [lr, weight_decay, momentum, beta2, epsilon] = rates;
    return {checked_rate(lr, "lr", infinity), checked_rate(weight_decay, "weight_decay", infinity),
            checked_rate(momentum, "momentum_or_beta1", 1), checked_rate(beta2, "beta2", 1),
            checked_rate(epsilon, "epsilon", infinity)};
}

// The pipeline as Python has it: keeps the buffers alive, and knows the process it belongs to.
class NativePipeline {
  public:
    explicit NativePipeline(Settings settings)
        : process_(getpid()),
          graveyard_(std::make_unique<Graveyard>()),
          core_(std::make_unique<Pipeline>(std::move(settings))) {}
    NativePipeline(const NativePipeline&) = delete;
    NativePipeline& operator=(const NativePipeline&) = delete;

    ~NativePipeline() {
        if (forked()) {  // the threads are not here, and locks may be held by them for ever: leave all as it is
            (void)core_.release();
            (void)graveyard_.release();
            return;
        }
        core_.reset();  // joins the threads, which never want the GIL; then the buffers may go
        graveyard_.reset();
    }

    std::size_t add_tensor(std::int64_t order, const std::string& rule_name, nb::handle master_object,
                           nb::handle residual_object, nb::handle first_object, nb::handle second_object,
                           nb::handle last_step_object, nb::handle live_object, std::int64_t group);
    void close();
    int fileno() { return core().event(); }
    void compress(std::int64_t step, std::size_t tensor, nb::handle gradient_object, double weight,
                  std::int64_t keep_blocks);
    void compress_live(std::int64_t step, std::size_t tensor, nb::handle live_object, std::int64_t keep_blocks);
    void await_compressed(double deadline_s);
    std::size_t owed(std::size_t tensor, nb::handle live_object, nb::handle out_object);
    void keep(std::int64_t step, std::size_t tensor, const std::vector<std::tuple<nb::object, nb::object>>& ranges);
    std::size_t keep_owed(std::int64_t step, std::size_t tensor, nb::handle live_object, nb::handle out_object);
    void take_kept(std::size_t tensor, std::int64_t step, double deadline_s);
    void apply(std::int64_t step, std::int64_t number, const std::vector<Rates5>& groups, bool maximize,
               double clip_norm);
    void carry(std::int64_t step) { core().carry(step); }
    nb::tuple fetch(const std::vector<std::size_t>& tensors, std::int64_t step, double deadline_s);
    nb::tuple changes(std::size_t tensor, std::int64_t step, double deadline_s);
    std::vector<std::int64_t> versions() { return core().versions(); }
    nb::list take_outgoing(std::size_t limit);
    nb::object deliver(int kind, std::uint64_t origin, std::uint64_t step, std::uint64_t tensor, std::uint64_t count,
                       nb::handle payload_object);
    void fail(const std::string& reason) { core().fail(reason); }
    void quiesce(double deadline_s);
    void resume() { core().resume(); }
    nb::list recent_parts();
    void idle(double deadline_s);
    nb::list digests();
    std::vector<std::string> waiting_for(std::size_t limit) { return core().waiting_for(limit); }
    nb::tuple take_stats();

  private:
    static Live live_for(Pipeline& pipeline, std::size_t tensor, nb::handle object, std::optional<Loaded>& buffer);
    bool forked() const { return getpid() != process_; }
    Pipeline& core();
    double await(Pipeline& pipeline, const std::vector<std::size_t>& tensors, std::int64_t step, double deadline_s);

    const pid_t process_;
    std::vector<Loaded> kept_;
    std::unique_ptr<Graveyard> graveyard_;
    std::unique_ptr<Pipeline> core_;
};

Pipeline& NativePipeline::core() {
    if (forked()) {
        refuse("the pipeline belongs to process " + std::to_string(process_) +
               ", which this one was forked from; make one here");
    }
    graveyard_->empty();
    return *core_;
}

void NativePipeline::close() {
    if (forked()) return;
    Pipeline& pipeline = core();
    {
        const GilReleased released(always);
        pipeline.close();
    }
    graveyard_->empty();
    const GilReleased released(always);
    graveyard_->wait_for_others();
}

std::size_t NativePipeline::add_tensor(std::int64_t order, const std::string& rule_name, nb::handle master_object,
                                       nb::handle residual_object, nb::handle first_object, nb::handle second_object,
                                       nb::handle last_step_object, nb::handle live_object, std::int64_t group) {
    Pipeline& pipeline = core();
    const Rule rule = format_named<Rule>(
        rule_name, "rule",
        {{"sgd", Rule::sgd}, {"nesterov", Rule::nesterov}, {"adam", Rule::adam}, {"adamw", Rule::adamw}});
    Loaded master = required(master_object, "master", Access::write);
    Loaded residual(residual_object, "residual", Access::write);
    Loaded first(first_object, "first", Access::write);
    Loaded second(second_object, "second", Access::write);
    Loaded last_step(last_step_object, "last_step", Access::write, step_entries);
    Loaded live(live_object, "live", Access::write, live_entries);
    const bool adaptive = rule == Rule::adam || rule == Rule::adamw;
    if ((rule != Rule::sgd && !first.given()) || (adaptive && !second.given()))
        refuse("rule '" + rule_name + "' needs its moments; pass buffers of zeros, as long as master");
    if (!residual.given() && pipeline.feeds_back())
        refuse("residual is None, but error feedback is on; pass a buffer of zeros, as long as master");
    for (const Loaded* buffer : {&residual, &first, &second, &live})
        check_entries(*buffer, master.entries, "it must be as long as master");
    check_entries(last_step, block_count(master.entries), "it must have one entry for each block of master");
    if (block_count(master.entries) > std::size_t{1} << 32)
        refuse("master has " + number(master.entries) + " entries, more than indices of 32 bits reach; split it");
    refuse_overlap({&master, &residual, &first, &second, &last_step, &live});
    const Parameters parameters{master.data,
                                first.data,
                                adaptive ? second.data : nullptr,
                                last_step.as<std::int32_t>(),
                                live_of(live),
                                master.entries};
    const std::size_t number = pipeline.add_tensor({checked_small(order, "order"), rule, parameters, residual.data,
                                                    static_cast<std::size_t>(checked_natural(group, "group"))});
    for (Loaded* buffer : {&master, &residual, &first, &second, &last_step, &live})
        kept_.push_back(std::move(*buffer));
    return number;
}

void NativePipeline::compress(std::int64_t step, std::size_t tensor, nb::handle gradient_object, double weight,
                              std::int64_t keep_blocks) {
    Pipeline& pipeline = core();
    if (pipeline.exchanges_updates())
        refuse("this pipeline exchanges updates; hand over live weights with compress_live, not gradients");
    const std::size_t keep = checked_keep(keep_blocks);
    Gradient gradient{nullptr, ValueFormat::float32, checked_weight(weight), keep, {}};
    if (gradient_object.is_none()) return pipeline.compress(step, tensor, std::move(gradient));
    Loaded buffer = required(gradient_object, "gradient", Access::read, live_entries);
    check_entries(buffer, pipeline.entries(tensor), "it must be as long as master");
    gradient.data = buffer.data;
    gradient.format = live_of(buffer).format;
    gradient.owner = graveyard_->lend(std::move(buffer));
    pipeline.compress(step, tensor, std::move(gradient));
}

// The tensor's own live buffer, or one handed over for it, kept by `buffer`.
Live NativePipeline::live_for(Pipeline& pipeline, std::size_t tensor, nb::handle object, std::optional<Loaded>& buffer) {
    if (!pipeline.exchanges_updates()) refuse("this pipeline exchanges gradients; it keeps no account of live weights");
    const Live live = pipeline.live(tensor);
    if (object.is_none() && live.data == nullptr)
        refuse("live is None, and the tensor was added without one; pass its present weights");
    if (!object.is_none() && live.data != nullptr) refuse("the tensor was added with its live weights; pass None");
    if (object.is_none()) return live;
    buffer.emplace(required(object, "live", Access::read, live_entries));
    check_entries(*buffer, pipeline.entries(tensor), "it must be as long as master");
    return live_of(*buffer);
}

void NativePipeline::compress_live(std::int64_t step, std::size_t tensor, nb::handle live_object,
                                   std::int64_t keep_blocks) {
    Pipeline& pipeline = core();
    const std::size_t keep = checked_keep(keep_blocks);
    std::optional<Loaded> buffer;
    const Live live = live_for(pipeline, tensor, live_object, buffer);
    Gradient gradient{live.data, live.format, 0, keep, {}, true};
    if (buffer.has_value()) gradient.owner = graveyard_->lend(std::move(*buffer));
    pipeline.compress(step, tensor, std::move(gradient));
}

void NativePipeline::await_compressed(double deadline_s) {
    Pipeline& pipeline = core();
    if (wait_for(deadline_s, [&](Clock::time_point until) { return pipeline.await_compressed(until); })) return;
    throw DeadlinePassed("parts are still being selected after " + std::to_string(deadline_s) +
                         " s; allow more time, or resume what is quiesced");
}

std::size_t NativePipeline::owed(std::size_t tensor, nb::handle live_object, nb::handle out_object) {
    Pipeline& pipeline = core();
    std::optional<Loaded> buffer;
    const Live live = live_for(pipeline, tensor, live_object, buffer);
    const Loaded out = required(out_object, "out", Access::write);
    check_entries(out, pipeline.entries(tensor), "it must be as long as master");
    const GilReleased released(always);
    return pipeline.owed(tensor, live, out.data);
}

void NativePipeline::keep(std::int64_t step, std::size_t tensor,
                          const std::vector<std::tuple<nb::object, nb::object>>& ranges) {
    Pipeline& pipeline = core();
    std::vector<KeptRange> kept;
    for (const auto& [source, into] : ranges) {
        Loaded from = required(source, "source", Access::read, byte_entries);
        Loaded to = required(into, "into", Access::write, byte_entries);
        check_entries(to, from.entries, "it must be as long as its source");
        refuse_overlap({&from, &to});
        const auto *const read = from.as<unsigned char>();
        auto *const write = to.as<unsigned char>();
        const std::size_t bytes = from.entries;
        kept.push_back({read, write, bytes, graveyard_->lend(std::move(from)), graveyard_->lend(std::move(to))});
    }
    pipeline.keep(step, tensor, std::move(kept));
}

std::size_t NativePipeline::keep_owed(std::int64_t step, std::size_t tensor, nb::handle live_object,
                                      nb::handle out_object) {
    Pipeline& pipeline = core();
    std::optional<Loaded> buffer;
    const Live live = pipeline.exchanges_updates() ? live_for(pipeline, tensor, live_object, buffer) : Live{};
    if (!pipeline.exchanges_updates() && !pipeline.feeds_back())
        refuse("without error feedback nothing is owed that could be kept");
    Loaded out = required(out_object, "out", Access::write);
    check_entries(out, pipeline.entries(tensor), "it must be as long as master");
    float* const data = out.data;
    std::shared_ptr<const void> owner = graveyard_->lend(std::move(out));
    const GilReleased released(always);
    return pipeline.keep_owed(step, tensor, live, data, std::move(owner));
}

void NativePipeline::take_kept(std::size_t tensor, std::int64_t step, double deadline_s) {
    Pipeline& pipeline = core();
    if (wait_for(deadline_s, [&](Clock::time_point until) { return pipeline.take_kept(tensor, step, until); })) return;
    throw DeadlinePassed("after " + std::to_string(deadline_s) + " s " +
                         pipeline.waiting(std::vector<std::size_t>{tensor}, step));
}

void NativePipeline::apply(std::int64_t step, std::int64_t number, const std::vector<Rates5>& groups, bool maximize,
                           double clip_norm) {
    Pipeline& pipeline = core();
    if (number < 1 || number > std::numeric_limits<std::int32_t>::max())
        refuse("update = " + std::to_string(number) + " is not the number of an update; the first is 1");
    Update update{static_cast<std::int32_t>(number), {}, maximize,
                  checked_rate(clip_norm, "clip_norm", std::numeric_limits<double>::infinity())};
    for (const Rates5& rates : groups) update.groups.push_back(checked_group(rates));
    pipeline.apply(step, std::move(update));
}

// Returns how many seconds it took.
double NativePipeline::await(Pipeline& pipeline, const std::vector<std::size_t>& tensors, std::int64_t step,
                             double deadline_s) {
    const Clock::time_point begun = Clock::now();
    const bool there =
        wait_for(deadline_s, [&](Clock::time_point until) { return pipeline.await(tensors, step, until); });
    const Clock::duration waited = Clock::now() - begun;
    pipeline.note_stall(waited);
    if (!there) {
        char spent[32];
        std::snprintf(spent, sizeof spent, "%.1f", deadline_s);
        throw DeadlinePassed("after " + std::string(spent) + " s " + pipeline.waiting(tensors, step));
    }
    return seconds(waited);
}

nb::tuple NativePipeline::fetch(const std::vector<std::size_t>& tensors, std::int64_t step, double deadline_s) {
    Pipeline& pipeline = core();
    pipeline.check_fetchable(tensors, true);
    const double waited_s = await(pipeline, tensors, step, deadline_s);
    Fetched fetched;
    {
        const GilReleased released(always);
        fetched = pipeline.publish(tensors, step);
    }
    return nb::make_tuple(fetched.version, fetched.fresh, waited_s);
}

nb::tuple NativePipeline::changes(std::size_t tensor, std::int64_t step, double deadline_s) {
    Pipeline& pipeline = core();
    const std::vector<std::size_t> tensors{tensor};
    pipeline.check_fetchable(tensors, false);
    const double waited_s = await(pipeline, tensors, step, deadline_s);
    std::pair<std::int64_t, Part> taken;
    {
        const GilReleased released(always);
        taken = pipeline.take_changes(tensor);
    }
    const nb::tuple arrays = as_arrays(std::move(taken.second));
    return nb::make_tuple(taken.first, waited_s, arrays[0], arrays[1]);
}

nb::list NativePipeline::take_outgoing(std::size_t limit) {
    nb::list rows;
    for (const Outgoing& message : core().take_outgoing(limit)) {
        const nb::bytes payload(message.payload->data.get(), message.payload->bytes);
        rows.append(nb::make_tuple(static_cast<int>(message.kind), message.urgency.step, message.tensor,
                                   message.urgency.order, message.count, payload));
    }
    return rows;
}

nb::object NativePipeline::deliver(int kind, std::uint64_t origin, std::uint64_t step, std::uint64_t tensor,
                                   std::uint64_t count, nb::handle payload_object) {
    Pipeline& pipeline = core();
    if (kind != 0 && kind != 1) refuse("kind = " + std::to_string(kind) + " is neither 0 (part) nor 1 (sum)");
    const Loaded payload = required(payload_object, "payload", Access::read, byte_entries);
    const char* why;
    {
        const GilReleased released(payload.entries);
        why = pipeline.deliver(kind == 0 ? MessageKind::part : MessageKind::sum, origin, step, tensor, count,
                               payload.as<unsigned char>(), payload.entries);
    }
    return why == nullptr ? nb::none() : nb::object(nb::str(why));
}

void NativePipeline::quiesce(double deadline_s) {
    Pipeline& pipeline = core();
    if (wait_for(deadline_s, [&](Clock::time_point until) { return pipeline.quiesce(until); })) return;
    pipeline.resume();
    throw DeadlinePassed("the running tasks did not end within " + std::to_string(deadline_s) + " s; allow more time");
}

void NativePipeline::idle(double deadline_s) {
    Pipeline& pipeline = core();
    if (wait_for(deadline_s, [&](Clock::time_point until) { return pipeline.idle(until); })) return;
    throw DeadlinePassed("tasks are still queued or running after " + std::to_string(deadline_s) +
                         " s; allow more time, or resume what is quiesced");
}

nb::list NativePipeline::recent_parts() {
    Pipeline& pipeline = core();
    std::vector<OwnPart> parts;
    {
        const GilReleased released(always);
        parts = pipeline.recent_parts();
    }
    nb::list rows;
    for (OwnPart& own : parts) {
        const nb::tuple arrays = as_arrays(std::move(own.part));
        rows.append(nb::make_tuple(own.step, own.tensor, arrays[0], arrays[1]));
    }
    return rows;
}

nb::list NativePipeline::digests() {
    nb::list rows;
    for (const Digest& digest : core().take_digests())
        rows.append(nb::make_tuple(digest.step, digest.tensor, digest.value));
    return rows;
}

nb::tuple NativePipeline::take_stats() {
    const Stats s = core().take_stats();
    return nb::make_tuple(s.queue.tasks, s.queue.queue_s, s.compress_s, s.sum_s, s.update_s, s.publish_s, s.kept_blocks,
                          s.found_blocks, s.all_blocks, s.nonfinite_blocks, s.payload_bytes, s.stall_s);
}

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

void bind_pipeline(nb::module_& m) {
    nb::register_exception_translator(translate);
    nb::class_<ThresholdController>(m, "ThresholdController")
        .def(nb::init<std::size_t>(), "target"_a)
        .def_prop_ro("threshold", &ThresholdController::threshold)
        .def_prop_ro("needs_sample", &ThresholdController::needs_sample)
        .def("aim_at", &ThresholdController::aim_at, "target"_a)
        .def("start", start_threshold, "scores"_a, "blocks"_a)
        .def("update", &ThresholdController::update, "found"_a);
    using P = NativePipeline;
    nb::class_<P>(m, "Pipeline")
        .def(
            "__init__",
            [](P* self, int rank, std::vector<std::vector<int>> islands, int threads, const std::string& policy,
               const std::string& values, const std::string& selection, bool error_feedback, std::int64_t digest_every,
               std::uint64_t seed, std::int64_t first_step, const std::string& exchange) {
                new (self) P(checked_settings(rank, std::move(islands), threads, policy, values, selection,
                                              error_feedback, digest_every, seed, first_step, exchange));
            },
            "rank"_a, "islands"_a, "threads"_a, "policy"_a, "values"_a, "selection"_a, "error_feedback"_a,
            "digest_every"_a, "seed"_a, "first_step"_a, "exchange"_a)
        .def("add_tensor", &P::add_tensor, "order"_a, "rule"_a, "master"_a.none(), "residual"_a.none(),
             "first"_a.none(), "second"_a.none(), "last_step"_a.none(), "live"_a.none(), "group"_a)
        .def("close", &P::close)
        .def("fileno", &P::fileno)
        .def("compress", &P::compress, "step"_a, "tensor"_a, "gradient"_a.none(), "weight"_a, "keep_blocks"_a)
        .def("compress_live", &P::compress_live, "step"_a, "tensor"_a, "live"_a.none(), "keep_blocks"_a)
        .def("await_compressed", &P::await_compressed, "deadline_s"_a)
        .def("owed", &P::owed, "tensor"_a, "live"_a.none(), "out"_a.none())
        .def("apply", &P::apply, "step"_a, "update"_a, "groups"_a, "maximize"_a, "clip_norm"_a)
        .def("keep", &P::keep, "step"_a, "tensor"_a, "ranges"_a)
        .def("keep_owed", &P::keep_owed, "step"_a, "tensor"_a, "live"_a.none(), "out"_a.none())
        .def("take_kept", &P::take_kept, "tensor"_a, "step"_a, "deadline_s"_a)
        .def("carry", &P::carry, "step"_a)
        .def("fetch", &P::fetch, "tensors"_a, "step"_a, "deadline_s"_a)
        .def("changes", &P::changes, "tensor"_a, "step"_a, "deadline_s"_a)
        .def("versions", &P::versions)
        .def("take_outgoing", &P::take_outgoing, "limit"_a)
        .def("deliver", &P::deliver, "kind"_a, "origin"_a, "step"_a, "tensor"_a, "count"_a, "payload"_a.none())
        .def("fail", &P::fail, "reason"_a)
        .def("quiesce", &P::quiesce, "deadline_s"_a)
        .def("resume", &P::resume)
        .def("recent_parts", &P::recent_parts)
        .def("idle", &P::idle, "deadline_s"_a)
        .def("digests", &P::digests)
        .def("waiting_for", &P::waiting_for, "limit"_a)
        .def("take_stats", &P::take_stats);
}

}  // namespace atoll_kernels
