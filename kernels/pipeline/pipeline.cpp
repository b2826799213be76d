#include "pipeline.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace atoll_kernels {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

constexpr std::size_t most_told = 8;  // of what one tensor lacks, in a message

std::string text(std::int64_t number) { return std::to_string(number); }
std::string text(std::size_t number) { return std::to_string(number); }

// splitmix64's finalizer; the same on every rank.
std::uint64_t mixed(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

}  // namespace

Pipeline::Tensor::Tensor(std::size_t tensor, const TensorSettings& settings, const Settings& all,
                         const Islands& islands)
    : number(tensor),
      order(settings.order),
      rule(settings.rule),
      group(settings.group),
      residual(all.error_feedback ? settings.residual : nullptr),
      selector(all.selection, residual, settings.parameters.n),
      weights(settings.parameters),
      weights_version(all.first_step - 1),
      ledger(islands, all.first_step) {}

Pipeline::Pipeline(Settings settings)
    : settings_(std::move(settings)),
      islands_(checked_islands(settings_.rank, settings_.islands)),
      ranks_(std::accumulate(settings_.islands.begin(), settings_.islands.end(), std::size_t{0},
                             [](std::size_t sum, const auto& island) { return sum + island.size(); })),
      planned_(settings_.first_step - 1),
      outbox_(settings_.policy),
      queue_(settings_.threads, settings_.policy, [this](const std::string& what) { break_down(what); }) {
    if (settings_.updates && settings_.error_feedback)
        refuse("error_feedback is on, but exchanging updates it is in the live weights themselves; pass False");
}

void Pipeline::close() {
    {
        const std::lock_guard<std::mutex> lock(books_);
        closed_ = true;
        changed_.notify_all();
    }
    queue_.close();
    std::vector<std::deque<std::pair<std::int64_t, Gradient>>> dropped;  // their owners go without the lock
    const std::lock_guard<std::mutex> lock(books_);
    for (const auto& tensor : tensors_) dropped.push_back(std::exchange(tensor->gradients, {}));
}

void Pipeline::check_open() const {
    if (closed_) refuse("the pipeline is closed; make a new one");
}

Pipeline::Tensor& Pipeline::at(std::size_t tensor) const {
    if (tensor >= tensors_.size())
        refuse("tensor = " + text(tensor) + " is not one of the " + text(tensors_.size()) + " that were added");
    return *tensors_[tensor];
}

Format Pipeline::format_of(const Tensor& tensor, std::int64_t step) const {
    const bool random = settings_.selection == SelectionRule::random;
    const Layout layout{random ? IndexFormat::none : IndexFormat::delta, settings_.values, block_entries,
                        tensor.weights.entries()};
    const std::uint64_t of_step = mixed(settings_.seed ^ mixed(static_cast<std::uint64_t>(step)));
    return {layout, mixed(of_step ^ tensor.number)};
}

std::size_t Pipeline::add_tensor(const TensorSettings& settings) {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    if (begun_) refuse("add_tensor came after the first step; add every tensor before compress, apply and deliver");
    if (settings_.updates) check_tensor_of_updates(settings);
    tensors_.push_back(std::make_unique<Tensor>(tensors_.size(), settings, settings_, islands_));
    return tensors_.size() - 1;
}

void Pipeline::compress(std::int64_t step, std::size_t tensor, Gradient gradient) {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    Tensor& t = at(tensor);
    if (step != t.ledger.compressed() + 1) {
        refuse("step = " + text(step) + " of tensor " + text(tensor) + " cannot be compressed after step " +
               text(t.ledger.compressed()) + "; every step once, in order");
    }
    begun_ = true;
    gradient.takes = t.account.takes();
    t.ledger.begin_step();
    t.gradients.emplace_back(step, std::move(gradient));
    if (!std::exchange(t.compressing, true)) push_compress(t);
}

void Pipeline::apply(std::int64_t step, Update update) {
    const std::lock_guard<std::mutex> lock(books_);
    check_plan(step, &update);
    Plan plan;
    if (update.clip_norm > 0) {
        plan.squares.resize(tensors_.size());
        plan.squares_missing = tensors_.size();
    }
    plan.update = std::move(update);
    put_plan(step, std::move(plan));
}

void Pipeline::carry(std::int64_t step) {
    const std::lock_guard<std::mutex> lock(books_);
    check_plan(step, nullptr);
    put_plan(step, {});
}

void Pipeline::check_plan(std::int64_t step, const Update* update) const {
    check_open();
    if (step != planned_ + 1) {
        refuse("step = " + text(step) + " cannot be applied or carried after step " + text(planned_) +
               "; every step once, in order");
    }
    if (settings_.updates) check_plan_of_updates(update);
    if (update == nullptr) return;
    for (const auto& tensor : tensors_) {
        if (tensor->group >= update->groups.size()) {
            refuse("groups has " + text(update->groups.size()) + " entries, but tensor " + text(tensor->number) +
                   " is of group " + text(tensor->group) + "; pass rates for every group");
        }
        const bool needs_first = update->groups[tensor->group].momentum_or_beta1 != 0;
        if (needs_first && !tensor->weights.has_first())
            refuse("momentum of tensor " + text(tensor->number) + " needs `first`, which it was added without");
    }
}

void Pipeline::put_plan(std::int64_t step, Plan plan) {
    begun_ = true;
    planned_ = step;
    plan.open = tensors_.size();
    if (tensors_.empty()) return;
    plans_.emplace(step, std::move(plan));
    for (const auto& tensor : tensors_) settle_if_ready(*tensor);
}

std::vector<Outgoing> Pipeline::take_outgoing(std::size_t limit) {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    return outbox_.take(limit);
}

const char* Pipeline::deliver(MessageKind kind, std::uint64_t origin, std::uint64_t step, std::uint64_t tensor,
                              std::uint64_t count, const unsigned char* data, std::size_t bytes) {
    {
        const std::lock_guard<std::mutex> lock(books_);
        check_open();
        if (const char* const why = refusal(kind, origin, step, tensor, count, bytes)) return why;
    }
    SharedPayload payload = copied(data, bytes);  // only now, and without the lock: it may be long
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    if (const char* const why = refusal(kind, origin, step, tensor, count, bytes)) return why;
    begun_ = true;
    Tensor& t = *tensors_[tensor];
    const auto signed_step = static_cast<std::int64_t>(step);
    t.ledger.claim(kind, origin, signed_step);
    push(t, signed_step, [this, &t, kind, origin, signed_step, count, payload = std::move(payload)](Scratch&) {
        run_read(t, kind, origin, signed_step, count, *payload);
    });
    return nullptr;
}

const char* Pipeline::refusal(MessageKind kind, std::uint64_t origin, std::uint64_t step, std::uint64_t tensor,
                              std::uint64_t count, std::size_t bytes) const {
    if (tensor >= tensors_.size()) return "unknown tensor";
    const Tensor& t = *tensors_[tensor];
    if (const char* const why = t.ledger.refusal(kind, origin, step)) return why;
    const Format format = format_of(t, 0);
    const bool fits = count <= format.blocks() && bytes <= largest_payload(format.layout, count);
    return fits ? nullptr : "too large";
}

bool Pipeline::await(std::span<const std::size_t> tensors, std::int64_t step, Clock::time_point until) {
    std::unique_lock<std::mutex> lock(books_);
    const auto there = [&](std::size_t tensor) { return at(tensor).ledger.version() >= step; };
    const auto over = [&] { return closed_ || failed_ || std::all_of(tensors.begin(), tensors.end(), there); };
    const bool in_time = changed_.wait_until(lock, until, over);
    check_open();
    if (failed_ && lost_) throw PeerIsLost(failure_);
    if (failed_) throw std::runtime_error(failure_);
    return in_time;
}

void Pipeline::note_stall(Clock::duration waited) {
    const std::lock_guard<std::mutex> lock(books_);
    stats_.stall_s += seconds(waited);
}

std::string Pipeline::waiting(std::span<const std::size_t> tensors, std::int64_t step) const {
    const std::lock_guard<std::mutex> lock(books_);
    for (const std::size_t tensor : tensors) {
        if (at(tensor).ledger.version() < step) return waits(at(tensor));
    }
    return "nothing is missing any more";
}

std::vector<std::string> Pipeline::waiting_for(std::size_t limit) const {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    std::vector<std::string> all;
    for (const auto& tensor : tensors_) {
        if (all.size() == limit) break;
        const std::int64_t begun = std::max(tensor->ledger.compressed(), planned_);
        if (tensor->ledger.version() < begun) all.push_back(waits(*tensor));
    }
    return all;
}

std::string Pipeline::waits(const Tensor& tensor) const {
    const std::int64_t step = tensor.ledger.version() + 1;
    std::vector<std::string> missing = tensor.ledger.missing();
    const auto plan = plans_.find(step);
    if (missing.empty() && plan == plans_.end()) missing.emplace_back("neither apply nor carry was called for it");
    if (missing.empty() && plan->second.squares_missing != 0)
        missing.push_back("the norm for clipping lacks " + text(plan->second.squares_missing) + " tensors");
    if (missing.empty()) missing.emplace_back("all is there, and its task is queued or running");
    std::string sentence = "tensor " + text(tensor.number) + " waits for step " + text(step) + ": " + missing[0];
    for (std::size_t k = 1; k < std::min(missing.size(), most_told); ++k) sentence += ", " + missing[k];
    if (missing.size() > most_told) sentence += " and " + text(missing.size() - most_told) + " more";
    return queue_.is_quiet() ? sentence + "; the pipeline is quiesced" : sentence;
}

void Pipeline::check_fetchable(std::span<const std::size_t> tensors, bool with_live) const {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    for (const std::size_t tensor : tensors) {
        if (at(tensor).weights.has_live() == with_live) continue;
        refuse("tensor " + text(tensor) + (with_live ? " has no live buffer to fetch into; take its changes"
                                                     : " has a live buffer; fetch it"));
    }
}

Fetched Pipeline::publish(std::span<const std::size_t> tensors, std::int64_t step) {
    const Clock::time_point begun = Clock::now();
    Fetched fetched{tensors.empty() ? step : std::numeric_limits<std::int64_t>::max(), 0};
    for (const std::size_t tensor : tensors) {
        Tensor& t = at(tensor);
        const std::lock_guard<std::mutex> lock(t.updating);
        if (settings_.updates) {
            t.weights.add_to_live(t.account.due().units());
            t.account.settle();
        } else {
            t.weights.publish();
        }
        fetched.version = std::min(fetched.version, t.weights_version);
        fetched.fresh += t.weights_version > step;
    }
    const std::lock_guard<std::mutex> lock(books_);
    stats_.publish_s += seconds(Clock::now() - begun);
    return fetched;
}

std::pair<std::int64_t, Part> Pipeline::take_changes(std::size_t tensor) {
    const Clock::time_point begun = Clock::now();
    Tensor& t = at(tensor);
    std::pair<std::int64_t, Part> taken;
    {
        const std::lock_guard<std::mutex> lock(t.updating);
        if (settings_.updates) {
            taken = {t.weights_version, t.account.take()};
        } else {
            taken = {t.weights_version, Part(t.weights.changed_blocks())};
            t.weights.take_changes(taken.second.index.get(), taken.second.values.get());
        }
    }
    const std::lock_guard<std::mutex> lock(books_);
    stats_.publish_s += seconds(Clock::now() - begun);
    return taken;
}

std::vector<std::int64_t> Pipeline::versions() const {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    std::vector<std::int64_t> versions;
    for (const auto& tensor : tensors_) versions.push_back(tensor->ledger.version());
    return versions;
}

std::vector<OwnPart> Pipeline::recent_parts() const {
    std::vector<std::pair<const Tensor*, Own>> own;
    {
        const std::lock_guard<std::mutex> lock(books_);
        check_open();
        for (const auto& tensor : tensors_) {
            for (const Own& part : tensor->recent) own.emplace_back(tensor.get(), part);
        }
    }
    const auto earlier = [](const auto& a, const auto& b) { return a.second.step < b.second.step; };
    std::stable_sort(own.begin(), own.end(), earlier);
    std::vector<OwnPart> parts;
    for (const auto& [tensor, part] : own) {
        OwnPart& mine = parts.emplace_back(part.step, tensor->number, Part());
        read(format_of(*tensor, part.step), *part.payload, part.count, mine.part);  // this rank wrote it
    }
    return parts;
}

std::vector<Digest> Pipeline::take_digests() {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    return std::exchange(digests_, {});
}

Stats Pipeline::take_stats() {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    Stats stats = std::exchange(stats_, Stats{});
    stats.queue = queue_.take_stats();
    return stats;
}

void Pipeline::fail(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    give_up(reason, true);
}

void Pipeline::break_down(const std::string& what) {
    const std::lock_guard<std::mutex> lock(books_);
    give_up("a task of the pipeline failed: " + what, false);
}

void Pipeline::give_up(std::string reason, bool lost) {
    if (failed_) return;  // the first reason is the cause
    failed_ = true;
    lost_ = lost;
    failure_ = std::move(reason);
    outbox_.wake();
    changed_.notify_all();
}

bool Pipeline::quiesce(Clock::time_point until) {
    {
        const std::lock_guard<std::mutex> lock(books_);
        check_open();
    }
    return queue_.quiesce(until);
}

void Pipeline::resume() {
    const std::lock_guard<std::mutex> lock(books_);
    check_open();
    queue_.resume();
}

bool Pipeline::idle(Clock::time_point until) {
    {
        const std::lock_guard<std::mutex> lock(books_);
        check_open();
    }
    return queue_.idle(until);
}

}  // namespace atoll_kernels
