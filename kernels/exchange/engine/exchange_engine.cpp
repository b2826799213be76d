#include "exchange_engine.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace atoll_kernels {
namespace {

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

ExchangeEngine::Tensor::Tensor(std::size_t tensor, const TensorSettings& settings, const Settings& all,
                               const Islands& islands, std::int64_t every, bool samples)
    : number(tensor),
      order(settings.order),
      rule(settings.rule),
      group(settings.group),
      residual(settings.residual),
      selector(all.selection, residual, settings.parameters.n, samples),
      weights(settings.parameters),
      weights_version(all.first_round - 1),
      rounding(settings.parameters.n),
      drift(settings.parameters.n),
      aggregator_sum(settings.aggregator_sum),
      aggregator_selector(all.selection, settings.aggregator_sum, settings.parameters.n, samples),
      rounds(islands, {all.first_round, every, settings.turn}, settings.aggregator) {}

ExchangeEngine::ExchangeEngine(Settings settings, bool replicas)
    : settings_(std::move(settings)),
      islands_(checked_islands(settings_.rank, settings_.islands, replicas)),
      ordered_(settings_.first_round - 1),
      queue_(settings_.threads, [this](const std::string& what) { break_down(what); }) {}

void ExchangeEngine::close() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        changed_.notify_all();
    }
    queue_.close();
    std::vector<std::deque<std::pair<std::int64_t, Gradient>>> dropped;  // their aggregators go without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& tensor : tensors_) dropped.push_back(std::exchange(tensor->gradients, {}));
}

void ExchangeEngine::check_open() const {
    if (closed_) refuse("the engine is closed; make a new one");
}

void ExchangeEngine::require_open() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
}

// After a wait, with mutex_ held.
void ExchangeEngine::check_failure() const {
    check_open();
    if (failed_ && lost_) throw PeerIsLost(failure_);
    if (failed_) throw std::runtime_error(failure_);
}

ExchangeEngine::Tensor& ExchangeEngine::at(std::size_t tensor) const {
    if (tensor >= tensors_.size())
        refuse("tensor = " + text(tensor) + " is not one of the " + text(tensors_.size()) + " that were added");
    return *tensors_[tensor];
}

Format ExchangeEngine::format_of(const Tensor& tensor, std::int64_t sync_round) const {
    const bool random = settings_.selection == SelectionRule::random;
    const Layout layout{random ? IndexFormat::none : IndexFormat::delta, settings_.values, tensor.weights.entries()};
    const std::uint64_t of_round = mixed(settings_.seed ^ mixed(static_cast<std::uint64_t>(sync_round)));
    return {layout, mixed(of_round ^ tensor.number)};
}

std::size_t ExchangeEngine::add(const TensorSettings& settings, std::int64_t every, bool samples) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    if (begun_) refuse("add_tensor came after the first round; add every tensor before compress, apply and deliver");
    tensors_.push_back(std::make_unique<Tensor>(tensors_.size(), settings, settings_, islands_, every, samples));
    return tensors_.size() - 1;
}

void ExchangeEngine::queue_part(std::int64_t sync_round, Tensor& tensor, Gradient gradient) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    check_compress(sync_round, tensor);
    begin_compress(sync_round, tensor, std::move(gradient));
}

void ExchangeEngine::check_compress(std::int64_t sync_round, const Tensor& tensor) const {
    if (sync_round == tensor.rounds.compressed() + 1) return;
    refuse("sync_round = " + text(sync_round) + " of tensor " + text(tensor.number) +
           " cannot be compressed after round " + text(tensor.rounds.compressed()) + "; every round once, in order");
}

void ExchangeEngine::begin_compress(std::int64_t sync_round, Tensor& tensor, Gradient gradient) {
    begun_ = true;
    gradient.takes = tensor.pending.takes();
    tensor.rounds.begin_round();
    tensor.gradients.emplace_back(sync_round, std::move(gradient));
    if (!std::exchange(tensor.compressing, true)) push_compress(tensor);
}

void ExchangeEngine::check_order(std::int64_t sync_round) const {
    check_open();
    if (sync_round == ordered_ + 1) return;
    refuse("sync_round = " + text(sync_round) + " cannot be applied or accumulated after round " + text(ordered_) +
           "; every round once, in order");
}

void ExchangeEngine::remember(std::size_t rounds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    if (rounds == 0) refuse("rounds = 0 remembers nothing; pass 1 or more");
    recent_rounds_ = rounds;
}

void ExchangeEngine::order_round_update(std::int64_t sync_round, RoundUpdate round_update) {
    begun_ = true;
    ordered_ = sync_round;
    round_update.open = tensors_.size();
    if (tensors_.empty()) return;
    round_updates_.emplace(sync_round, std::move(round_update));
    for (const auto& tensor : tensors_) reduce_if_ready(*tensor);
}

std::vector<Outgoing> ExchangeEngine::take_outgoing(std::size_t limit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    return outbox_.take(limit);
}

const char* ExchangeEngine::deliver(MessageKind kind, std::uint64_t origin, std::uint64_t sync_round,
                                    std::uint64_t tensor, std::uint64_t count, const unsigned char* data,
                                    std::size_t bytes) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        check_open();
        if (const char* const why = refusal(kind, origin, sync_round, tensor, count, bytes)) return why;
    }
    SharedPayload payload = copied(data, bytes);  // only now, and without the lock: it may be long
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    if (const char* const why = refusal(kind, origin, sync_round, tensor, count, bytes)) return why;
    begun_ = true;
    Tensor& t = *tensors_[tensor];
    const auto signed_round = static_cast<std::int64_t>(sync_round);
    t.rounds.claim(kind, origin, signed_round);
    push(t, signed_round, [this, &t, kind, origin, signed_round, count, payload = std::move(payload)](Scratch&) {
        run_read(t, kind, origin, signed_round, count, *payload);
    });
    return nullptr;
}

const char* ExchangeEngine::refusal(MessageKind kind, std::uint64_t origin, std::uint64_t sync_round,
                                    std::uint64_t tensor, std::uint64_t count, std::size_t bytes) const {
    if (tensor >= tensors_.size()) return "unknown tensor";
    const Tensor& t = *tensors_[tensor];
    if (const char* const why = t.rounds.refusal(kind, origin, sync_round)) return why;
    const Format format = format_of(t, 0);
    const bool fits = count <= format.blocks() && bytes <= largest_payload(format.layout, count);
    return fits ? nullptr : "too large";
}

bool ExchangeEngine::await(std::span<const std::size_t> tensors, std::int64_t sync_round, Clock::time_point until) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto there = [&](std::size_t tensor) { return at(tensor).rounds.version() >= sync_round; };
    const auto over = [&] { return closed_ || failed_ || std::all_of(tensors.begin(), tensors.end(), there); };
    const bool in_time = changed_.wait_until(lock, until, over);
    check_failure();
    return in_time;
}

bool ExchangeEngine::await_compressed(std::span<const std::size_t> tensors, Clock::time_point until) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto all_quiet = [&] {
        if (tensors.empty()) return std::ranges::none_of(tensors_, [](const auto& one) { return one->compressing; });
        return std::ranges::none_of(tensors, [this](std::size_t tensor) { return at(tensor).compressing; });
    };
    const auto over = [&] { return closed_ || failed_ || all_quiet(); };
    const bool in_time = changed_.wait_until(lock, until, over);
    check_failure();
    return in_time;
}

void ExchangeEngine::note_stall(Clock::duration waited) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.stall_s += seconds(waited);
}

std::string ExchangeEngine::waiting(std::span<const std::size_t> tensors, std::int64_t sync_round) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::size_t tensor : tensors) {
        if (at(tensor).rounds.version() < sync_round) return waits(at(tensor));
    }
    return "nothing is missing any more";
}

std::string ExchangeEngine::waits(const Tensor& tensor) const {
    const std::int64_t sync_round = tensor.rounds.version() + 1;
    std::vector<std::string> missing = tensor.rounds.missing();
    const auto round_update = round_updates_.find(sync_round);
    if (missing.empty() && round_update == round_updates_.end()) missing.emplace_back("no update was ordered for it");
    if (missing.empty() && round_update->second.squares_missing != 0)
        missing.push_back("the norm for clipping lacks " + text(round_update->second.squares_missing) + " tensors");
    if (missing.empty()) missing.emplace_back("all is there, and its task is queued or running");
    std::string sentence =
        "tensor " + text(tensor.number) + " waits for sync round " + text(sync_round) + ": " + missing[0];
    for (std::size_t k = 1; k < std::min(missing.size(), most_told); ++k) sentence += ", " + missing[k];
    if (missing.size() > most_told) sentence += " and " + text(missing.size() - most_told) + " more";
    return queue_.is_quiet() ? sentence + "; the engine is quiesced" : sentence;
}

void ExchangeEngine::check_fetchable(std::span<const std::size_t> tensors, bool with_live) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    for (const std::size_t tensor : tensors) {
        if (at(tensor).weights.has_live() == with_live) continue;
        refuse("tensor " + text(tensor) +
               (with_live ? " has no live buffer to fetch into; take its changes" : " has a live buffer; fetch it"));
    }
}

Fetched ExchangeEngine::publish(std::span<const std::size_t> tensors, std::int64_t sync_round) {
    const double begun_s = processor_s();
    Fetched fetched{tensors.empty() ? sync_round : std::numeric_limits<std::int64_t>::max(), 0};
    for (const std::size_t tensor : tensors) {
        Tensor& t = at(tensor);
        const std::lock_guard<std::mutex> lock(t.weights_mutex);
        publish_live(t);
        fetched.version = std::min(fetched.version, t.weights_version);
        fetched.fresh += t.weights_version > sync_round;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.publish_s += processor_s() - begun_s;
    return fetched;
}

std::vector<Change> ExchangeEngine::take_changes(std::span<const std::size_t> tensors) {
    const double begun_s = processor_s();
    std::vector<Change> taken;
    for (const std::size_t tensor : tensors) {
        Tensor& t = at(tensor);
        const std::lock_guard<std::mutex> lock(t.weights_mutex);
        taken.emplace_back(t.weights_version, take_changed(t));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.publish_s += processor_s() - begun_s;
    return taken;
}

std::vector<std::int64_t> ExchangeEngine::versions() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    std::vector<std::int64_t> versions;
    for (const auto& tensor : tensors_) versions.push_back(tensor->rounds.version());
    return versions;
}

void ExchangeEngine::read_shared_param(std::size_t tensor, float* out) {
    require_open();
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.weights_mutex);
    std::copy_n(t.weights.shared_param(), t.weights.entries(), out);
}

std::vector<OwnPart> ExchangeEngine::recent_parts() const {
    std::vector<std::pair<const Tensor*, Own>> own;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        check_open();
        for (const auto& tensor : tensors_) {
            for (const Own& part : tensor->recent) own.emplace_back(tensor.get(), part);
            for (const Own& total : tensor->recent_totals) own.emplace_back(tensor.get(), total);
        }
    }
    const auto earlier = [](const auto& a, const auto& b) { return a.second.sync_round < b.second.sync_round; };
    std::stable_sort(own.begin(), own.end(), earlier);
    std::vector<OwnPart> parts;
    for (const auto& [tensor, part] : own) {
        OwnPart& mine = parts.emplace_back(part.kind, part.sync_round, tensor->number, Part());
        read(format_of(*tensor, part.sync_round), *part.payload, part.count, mine.part);  // this rank wrote it
    }
    return parts;
}

std::vector<Digest> ExchangeEngine::take_digests() {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    return std::exchange(digests_, {});
}

Stats ExchangeEngine::take_stats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    Stats stats = std::exchange(stats_, Stats{});
    stats.queue = queue_.take_stats();
    return stats;
}

void ExchangeEngine::fail(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;  // nobody waits any more
    give_up(reason, true);
}

void ExchangeEngine::break_down(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    give_up("a task of the exchange engine failed: " + what, false);
}

void ExchangeEngine::give_up(std::string reason, bool lost) {
    if (failed_) return;  // the first reason is the cause
    failed_ = true;
    lost_ = lost;
    failure_ = std::move(reason);
    outbox_.wake();
    changed_.notify_all();
}

bool ExchangeEngine::quiesce(Clock::time_point until) {
    require_open();
    return queue_.quiesce(until);
}

void ExchangeEngine::resume() {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    queue_.resume();
}

bool ExchangeEngine::idle(Clock::time_point until) {
    require_open();
    return queue_.idle(until);
}

}  // namespace atoll_kernels
