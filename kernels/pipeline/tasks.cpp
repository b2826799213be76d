// The tasks, and how one follows from another: compress -> (parts of the island are here) -> sum -> (sums of all islands
// are here, the step is planned) -> settle, which totals and updates. With clipping the update waits for all totals.
#include <cmath>
#include <utility>

#include "../cpu/squared_norm.hpp"
#include "pipeline.hpp"

namespace atoll_kernels {

void Pipeline::push(const Tensor& tensor, std::int64_t step, TaskQueue::Task task) {
    queue_.push(step, tensor.order, std::move(task));
}

void Pipeline::push_compress(Tensor& tensor) {
    push(tensor, tensor.gradients.front().first, [this, &tensor](Scratch& scratch) { run_compress(tensor, scratch); });
}

void Pipeline::run_compress(Tensor& tensor, Scratch& scratch) {
    std::unique_lock<std::mutex> books(books_);
    if (tensor.gradients.empty()) return;  // closed meanwhile
    auto [step, gradient] = std::move(tensor.gradients.front());
    tensor.gradients.pop_front();
    books.unlock();
    const Clock::time_point begun = Clock::now();
    Selected own;
    {
        const std::lock_guard<std::mutex> lock(tensor.owed);
        tensor.kept_owed.before(step);
        own = gradient.is_live ? compress_live(tensor, step, gradient, scratch)
                               : tensor.selector.select(gradient, format_of(tensor, step), scratch);
    }
    const double compress_s = seconds(Clock::now() - begun);
    gradient.owner = nullptr;
    books.lock();
    stats_.compress_s += compress_s;
    stats_.kept_blocks += own.selection.kept;
    stats_.found_blocks += own.selection.found;
    stats_.nonfinite_blocks += own.selection.nonfinite;
    stats_.all_blocks += block_count(tensor.weights.entries());
    tensor.recent.push_back({step, own.written.part->count, own.written.payload});
    if (tensor.recent.size() > recent_steps) tensor.recent.pop_front();
    tensor.compressing = !tensor.gradients.empty();
    if (tensor.compressing) push_compress(tensor);
    changed_.notify_all();
    part_is_here(tensor, step, islands_.place, std::move(own.written));
}

void Pipeline::send(MessageKind kind, const Tensor& tensor, std::int64_t step, std::size_t count,
                    SharedPayload payload) {
    stats_.payload_bytes += payload->bytes;
    outbox_.put({kind, tensor.number, count, std::move(payload), {step, tensor.order, 0}});
}

void Pipeline::part_is_here(Tensor& tensor, std::int64_t step, std::size_t place, Written own) {
    const bool mine = place == islands_.place;
    if (mine && !islands_.alone()) send(MessageKind::part, tensor, step, own.part->count, own.payload);
    if (!tensor.ledger.put_part(step, place, own.part)) return;
    if (islands_.alone()) {
        tensor.ledger.take_parts(step);
        own_sum_is_here(tensor, step, std::move(own));  // the same bytes
        return;
    }
    push(tensor, step, [this, &tensor, step](Scratch& scratch) { run_sum(tensor, step, scratch); });
}

void Pipeline::run_read(Tensor& tensor, MessageKind kind, std::size_t origin, std::int64_t step, std::size_t count,
                        const Payload& payload) {
    const Clock::time_point begun = Clock::now();
    const Format format = format_of(tensor, step);
    auto read_part = std::make_shared<Part>();
    const char* const wrong = read(format, payload, count, *read_part);
    SharedPart part = std::move(read_part);
    const double read_s = seconds(Clock::now() - begun);
    const std::lock_guard<std::mutex> lock(books_);
    stats_.sum_s += read_s;
    const bool is_part = kind == MessageKind::part;
    if (wrong != nullptr) {
        give_up((is_part ? "rank " : "island ") + std::to_string(origin) + " sent a damaged " +
                    (is_part ? "part" : "sum") + " of tensor " + std::to_string(tensor.number) + " for step " +
                    std::to_string(step) + ": the payload of " + std::to_string(payload.bytes) + " bytes for " +
                    std::to_string(count) + " of " + std::to_string(format.blocks()) + " blocks " + wrong,
                true);
    } else if (is_part) {
        part_is_here(tensor, step, tensor.ledger.place_of(origin), {std::move(part), nullptr});
    } else if (tensor.ledger.put_sum(step, origin, std::move(part))) {
        settle_if_ready(tensor);
    }
}

void Pipeline::run_sum(Tensor& tensor, std::int64_t step, Scratch& scratch) {
    std::unique_lock<std::mutex> books(books_);
    const std::vector<SharedPart> parts = tensor.ledger.take_parts(step);
    if (settings_.selection == SelectionRule::random) {
        for (std::size_t place = 0; place < parts.size(); ++place) {
            const std::size_t count = parts[place]->count, own = parts[islands_.place]->count;
            if (count == own) continue;
            return give_up("rank " + std::to_string(islands_.mates()[place]) + " keeps " + std::to_string(count) +
                               " random blocks of tensor " + std::to_string(tensor.number) + " in step " +
                               std::to_string(step) + ", this rank " + std::to_string(own) +
                               ": their plans differ",
                           true);
        }
    }
    books.unlock();
    const Clock::time_point begun = Clock::now();
    const Units units = sum_of(parts, scratch);
    Written sum;
    if (islands_.leads() && tensor.residual != nullptr) {  // one of all owes what rounding the sum takes away
        const std::lock_guard<std::mutex> lock(tensor.owed);
        sum = written(format_of(tensor, step), units, tensor.residual, scratch);
        if (tensor.kept_owed.misses(step)) tensor.kept_owed.add(minus(units, sum.part->units()).units());
    } else {
        sum = written(format_of(tensor, step), units, nullptr, scratch);
    }
    if (settings_.updates && islands_.leads() && settings_.values != ValueFormat::float32) {
        auto lost = std::make_shared<const Part>(minus(units, sum.part->units()));
        const std::lock_guard<std::mutex> owed_lock(tensor.owed);
        const std::lock_guard<std::mutex> lock(tensor.updating);
        if (tensor.kept_owed.misses(step)) tensor.kept_owed.add(lost->units());
        tensor.account.note(step, std::move(lost), -ranks());  // the leader alone owes it again
    }
    const double sum_s = seconds(Clock::now() - begun);
    books.lock();
    stats_.sum_s += sum_s;
    own_sum_is_here(tensor, step, std::move(sum));
}

void Pipeline::own_sum_is_here(Tensor& tensor, std::int64_t step, Written sum) {
    if (islands_.leads() && !islands_.single())
        send(MessageKind::sum, tensor, step, sum.part->count, std::move(sum.payload));
    if (tensor.ledger.put_sum(step, islands_.mine, std::move(sum.part))) settle_if_ready(tensor);
}

void Pipeline::settle_if_ready(Tensor& tensor) {
    const std::int64_t step = tensor.ledger.version() + 1;
    if (!tensor.ledger.next_is_complete() || !plans_.contains(step)) return;
    auto sums = std::make_shared<std::vector<SharedPart>>(tensor.ledger.take_next_sums());
    if (tensor.carried != nullptr) sums->insert(sums->begin(), std::exchange(tensor.carried, nullptr));
    push(tensor, step, [this, &tensor, step, sums](Scratch& scratch) { run_settle(tensor, step, *sums, scratch); });
}

void Pipeline::run_settle(Tensor& tensor, std::int64_t step, const std::vector<SharedPart>& sums, Scratch& scratch) {
    std::unique_lock<std::mutex> books(books_);
    Plan& plan = plans_.at(step);  // stays where it is until every tensor is through
    books.unlock();
    const bool carry = !plan.update.has_value(), clip = !carry && plan.update->clip_norm > 0;
    const Clock::time_point begun = Clock::now();
    const Units units = sums.size() == 1 ? sums.front()->units() : sum_of(sums, scratch);
    const double square = clip ? squared_norm(units.values, units.count * block_entries, 1, best_path()) : 0;
    SharedPart total;
    if (carry || clip) total = sums.size() == 1 ? sums.front() : copied(units);
    const double sum_s = seconds(Clock::now() - begun);
    books.lock();
    stats_.sum_s += sum_s;
    if (clip) {
        tensor.total = std::move(total);
        plan.squares[tensor.number] = square;
        if (--plan.squares_missing == 0) scale_is_known(step, plan);
        return;
    }
    tensor.carried = std::move(total);
    books.unlock();
    advance(tensor, plan, step, carry ? nullptr : &units);
}

void Pipeline::scale_is_known(std::int64_t step, Plan& plan) {
    double square = 0;
    for (const double one : plan.squares) square += one;
    const double norm = std::sqrt(square), limit = plan.update->clip_norm;
    if (norm > limit) plan.scale = limit / (norm + 1e-6);
    for (const auto& tensor : tensors_) {
        const auto total = std::make_shared<SharedPart>(std::exchange(tensor->total, nullptr));
        push(*tensor, step, [this, &t = *tensor, &plan, step, total](Scratch&) {
            const Units units = (*total)->units();
            advance(t, plan, step, &units);
        });
    }
}

Rates Pipeline::rates_of(const Tensor& tensor, const Plan& plan) const {
    const Update& update = *plan.update;
    const Group& group = update.groups[tensor.group];
    return {.rule = tensor.rule,
            .lr = group.lr,
            .weight_decay = group.weight_decay,
            .momentum_or_beta1 = group.momentum_or_beta1,
            .beta2 = group.beta2,
            .epsilon = group.epsilon,
            .scale = update.maximize ? -plan.scale : plan.scale,
            .step = update.number};
}

void Pipeline::advance(Tensor& tensor, const Plan& plan, std::int64_t step, const Units* total) {
    const Clock::time_point begun = Clock::now();
    const bool digest_due = settings_.digest_every != 0 && step % settings_.digest_every == 0;
    Digest digest{step, tensor.number, 0};
    {
        const std::lock_guard<std::mutex> lock(tensor.updating);
        tensor.kept.before(step);
        if (total != nullptr) tensor.weights.update(*total, rates_of(tensor, plan));
        if (total != nullptr && settings_.updates) tensor.account.close(step, *total);
        tensor.weights_version = step;
        if (digest_due) digest.value = tensor.weights.digest();
    }
    const double update_s = seconds(Clock::now() - begun);
    const std::lock_guard<std::mutex> lock(books_);
    stats_.update_s += update_s;
    if (digest_due) digests_.push_back(digest);
    close_step(tensor, step);
}

void Pipeline::close_step(Tensor& tensor, std::int64_t step) {
    tensor.ledger.close_next();
    const auto plan = plans_.find(step);
    if (--plan->second.open == 0) plans_.erase(plan);
    changed_.notify_all();
    settle_if_ready(tensor);
}

}  // namespace atoll_kernels
