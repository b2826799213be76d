#include "native.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "../gil.hpp"

namespace atoll_kernels {
namespace {

constexpr std::size_t always = chunk_entries;  // so much work that the GIL is released for it

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

}  // namespace

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

}  // namespace atoll_kernels
