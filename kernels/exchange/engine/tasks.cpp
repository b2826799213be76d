// The tasks, and how one follows from another: compress -> (parts of the island are here) -> sum -> (sums of all
// islands are here, the round's update is ordered) -> reduce, which totals and updates. With clipping the update waits
// for all totals. Of a tensor with an aggregator: (sums of all islands are at the aggregator) -> own -> (its total is
// here) -> reduce.
#include <utility>

#include "exchange_engine.hpp"

namespace atoll_kernels {

void ExchangeEngine::push(const Tensor& tensor, std::int64_t sync_round, TaskQueue::Task task) {
    queue_.push(sync_round, tensor.order, std::move(task));
}

void ExchangeEngine::push_compress(Tensor& tensor) {
    push(tensor, tensor.gradients.front().first, [this, &tensor](Scratch& scratch) { run_compress(tensor, scratch); });
}

void ExchangeEngine::run_compress(Tensor& tensor, Scratch& scratch) {
    std::unique_lock<std::mutex> state_lock(mutex_);
    if (tensor.gradients.empty()) return;  // closed meanwhile
    auto [sync_round, gradient] = std::move(tensor.gradients.front());
    tensor.gradients.pop_front();
    state_lock.unlock();
    const double begun_s = processor_s();
    Selected own;
    DriftSquares drift;
    {
        const std::lock_guard<std::mutex> lock(tensor.residual_mutex);
        tensor.residual_snapshot.before(sync_round);
        own = choose_part(tensor, sync_round, gradient, scratch, drift);
    }
    const double compress_s = processor_s() - begun_s;
    gradient.owner = nullptr;
    state_lock.lock();
    stats_.compress_s += compress_s;
    stats_.drift.outstanding += drift.outstanding;
    stats_.drift.update += drift.update;
    stats_.chosen_blocks += own.selection.chosen;
    stats_.found_blocks += own.selection.found;
    stats_.nonfinite_blocks += own.selection.nonfinite;
    stats_.all_blocks += block_count(tensor.weights.entries());
    tensor.recent.push_back({MessageKind::part, sync_round, own.encoded.part->count, own.encoded.payload});
    while (tensor.recent.size() > recent_rounds_) tensor.recent.pop_front();
    tensor.compressing = !tensor.gradients.empty();
    if (tensor.compressing) push_compress(tensor);
    changed_.notify_all();
    part_is_here(tensor, sync_round, islands_.place, std::move(own.encoded));
}

void ExchangeEngine::send(MessageKind kind, const Tensor& tensor, std::int64_t sync_round, std::size_t count,
                          SharedPayload payload, int to) {
    stats_.payload_bytes += payload->bytes;
    outbox_.put({kind, tensor.number, count, std::move(payload), {sync_round, tensor.order, 0}, to});
}

void ExchangeEngine::part_is_here(Tensor& tensor, std::int64_t sync_round, std::size_t place, EncodedPart own) {
    const bool mine = place == islands_.place;
    if (tensor.rounds.aggregator().has_value() && !islands_.leads())  // the leader alone needs it
        return send(MessageKind::part, tensor, sync_round, own.part->count, own.payload, islands_.mates().front());
    if (mine && !islands_.alone() && !tensor.rounds.aggregator().has_value())
        send(MessageKind::part, tensor, sync_round, own.part->count, own.payload);
    if (!tensor.rounds.put_part(sync_round, place, own.part)) return;
    if (islands_.alone()) {
        tensor.rounds.take_parts(sync_round);
        own_sum_is_here(tensor, sync_round, std::move(own));  // the same bytes
        return;
    }
    push(tensor, sync_round, [this, &tensor, sync_round](Scratch& scratch) { run_sum(tensor, sync_round, scratch); });
}

void ExchangeEngine::run_read(Tensor& tensor, MessageKind kind, std::size_t origin, std::int64_t sync_round,
                              std::size_t count, const Payload& payload) {
    const double begun_s = processor_s();
    const Format format = format_of(tensor, sync_round);
    auto read_part = std::make_shared<Part>();
    const char* const wrong = read(format, payload, count, *read_part);
    SharedPart part = std::move(read_part);
    const double read_s = processor_s() - begun_s;
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.sum_s += read_s;
    const bool is_part = kind == MessageKind::part, is_total = kind == MessageKind::from_aggregator;
    if (wrong != nullptr) {
        give_up((is_part ? "rank " : "island ") + std::to_string(origin) + " sent a damaged " +
                    (is_part    ? "part"
                     : is_total ? "total"
                                : "sum") +
                    " of tensor " + std::to_string(tensor.number) + " for sync round " +
                    std::to_string(sync_round) + ": the payload of " + std::to_string(payload.bytes) + " bytes for " +
                    std::to_string(count) + " of " + std::to_string(format.blocks()) + " blocks " + wrong,
                true);
    } else if (is_part) {
        part_is_here(tensor, sync_round, tensor.rounds.place_of(origin), {std::move(part), nullptr});
    } else if (is_total) {
        tensor.rounds.put_total(sync_round, std::move(part));
        reduce_if_ready(tensor);
    } else if (tensor.rounds.put_sum(sync_round, origin, std::move(part))) {
        reduce_if_ready(tensor);
    }
}

void ExchangeEngine::run_sum(Tensor& tensor, std::int64_t sync_round, Scratch& scratch) {
    std::unique_lock<std::mutex> state_lock(mutex_);
    const std::vector<SharedPart> parts = tensor.rounds.take_parts(sync_round);
    if (settings_.selection == SelectionRule::random) {
        for (std::size_t place = 0; place < parts.size(); ++place) {
            const std::size_t count = parts[place]->count, own = parts[islands_.place]->count;
            if (count == own) continue;
            return give_up("rank " + std::to_string(islands_.mates()[place]) + " sends " + std::to_string(count) +
                               " random blocks of tensor " + std::to_string(tensor.number) + " in sync round " +
                               std::to_string(sync_round) + ", this rank " + std::to_string(own) +
                               ": their plans differ",
                           true);
        }
    }
    state_lock.unlock();
    const double begun_s = processor_s();
    const Units units = sum_of(parts, scratch);
    EncodedPart sum = encode_sum(tensor, sync_round, units, scratch);
    const double sum_s = processor_s() - begun_s;
    state_lock.lock();
    stats_.sum_s += sum_s;
    own_sum_is_here(tensor, sync_round, std::move(sum));
}

void ExchangeEngine::own_sum_is_here(Tensor& tensor, std::int64_t sync_round, EncodedPart sum) {
    const std::optional<std::size_t> aggregator = tensor.rounds.aggregator();
    if (aggregator.has_value() && !tensor.rounds.owns()) {
        if (islands_.leads())
            send(MessageKind::to_aggregator, tensor, sync_round, sum.part->count, std::move(sum.payload),
                 islands_.members[*aggregator].front());
        return;
    }
    if (!aggregator.has_value() && islands_.leads() && !islands_.single())
        send(MessageKind::sum, tensor, sync_round, sum.part->count, std::move(sum.payload));
    if (tensor.rounds.put_sum(sync_round, islands_.mine, std::move(sum.part))) reduce_if_ready(tensor);
}

void ExchangeEngine::reduce_if_ready(Tensor& tensor) {
    const std::int64_t sync_round = tensor.rounds.version() + 1;
    const auto round_update = round_updates_.find(sync_round);
    if (round_update == round_updates_.end()) return;
    if (tensor.rounds.aggregator_may_total()) {
        const auto sums = std::make_shared<const std::vector<SharedPart>>(tensor.rounds.take_owned_sums());
        return push(tensor, sync_round, [this, &tensor, sync_round, sums](Scratch& scratch) {
            run_own(tensor, sync_round, *sums, scratch);
        });
    }
    if (!tensor.rounds.next_is_complete()) return;
    if (!tensor.rounds.is_due(sync_round)) {
        (void)tensor.rounds.take_next_sums();
        return push(tensor, sync_round, [this, &tensor, &done = round_update->second, sync_round](Scratch&) {
            advance(tensor, done, sync_round, nullptr);
        });
    }
    auto sums = std::make_shared<std::vector<SharedPart>>(tensor.rounds.take_next_sums());
    if (tensor.accumulated != nullptr) sums->insert(sums->begin(), std::exchange(tensor.accumulated, nullptr));
    push(tensor, sync_round,
         [this, &tensor, sync_round, sums](Scratch& scratch) { run_reduce(tensor, sync_round, *sums, scratch); });
}

// The aggregator's sum keeps what the shared parameters are behind by; everybody gets the heaviest blocks of it.
void ExchangeEngine::run_own(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>& sums,
                             Scratch& scratch) {
    std::unique_lock<std::mutex> state_lock(mutex_);
    const std::size_t k_blocks = tensor.aggregator_blocks;
    state_lock.unlock();
    const double begun_s = processor_s();
    const Units units = sums.size() == 1 ? sums.front()->units() : sum_of(sums, scratch);
    EncodedPart total;
    {
        const std::lock_guard<std::mutex> lock(tensor.weights_mutex);
        tensor.snapshot.before(sync_round);
        add_to(tensor.aggregator_sum, tensor.weights.entries(), units);
        const Gradient nothing_new{.k_blocks = k_blocks};
        total = tensor.aggregator_selector.select(nothing_new, format_of(tensor, sync_round), scratch).encoded;
    }
    const double sum_s = processor_s() - begun_s;
    state_lock.lock();
    stats_.sum_s += sum_s;
    tensor.recent_totals.push_back({MessageKind::from_aggregator, sync_round, total.part->count, total.payload});
    while (tensor.recent_totals.size() > recent_rounds_) tensor.recent_totals.pop_front();
    send(MessageKind::from_aggregator, tensor, sync_round, total.part->count, std::move(total.payload));
    tensor.rounds.put_total(sync_round, std::move(total.part));
    reduce_if_ready(tensor);
}

void ExchangeEngine::run_reduce(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>& sums,
                                Scratch& scratch) {
    std::unique_lock<std::mutex> state_lock(mutex_);
    RoundUpdate& round_update = round_updates_.at(sync_round);  // stays where it is until every tensor is through
    state_lock.unlock();
    const double begun_s = processor_s();
    const Units total = sums.size() == 1 ? sums.front()->units() : sum_of(sums, scratch);
    const double sum_s = processor_s() - begun_s;
    state_lock.lock();
    stats_.sum_s += sum_s;
    state_lock.unlock();
    take_total(tensor, sync_round, sums, total, round_update);
}

void ExchangeEngine::advance(Tensor& tensor, const RoundUpdate& round_update, std::int64_t sync_round,
                             const Units* total) {
    const double begun_s = processor_s();
    const bool digest_due = settings_.digest_every != 0 && sync_round % settings_.digest_every == 0;
    Digest digest{sync_round, tensor.number, 0};
    {
        const std::lock_guard<std::mutex> lock(tensor.weights_mutex);
        tensor.snapshot.before(sync_round);
        if (total != nullptr) update(tensor, round_update, sync_round, *total);
        tensor.weights_version = sync_round;
        if (digest_due) digest.value = tensor.weights.digest();
    }
    const double update_s = processor_s() - begun_s;
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.update_s += update_s;
    if (digest_due) digests_.push_back(digest);
    close_round(tensor, sync_round);
}

void ExchangeEngine::close_round(Tensor& tensor, std::int64_t sync_round) {
    tensor.rounds.close_next();
    const auto round_update = round_updates_.find(sync_round);
    if (--round_update->second.open == 0) {
        ++stats_.rounds;
        stats_.rounds_s += seconds(Clock::now() - round_update->second.begun);
        round_updates_.erase(round_update);
    }
    changed_.notify_all();
    reduce_if_ready(tensor);
}

}  // namespace atoll_kernels
