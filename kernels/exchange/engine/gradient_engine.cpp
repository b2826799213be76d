// Parts and residuals of gradients, and the sparse optimizer's updates. With clipping they wait for all totals.
#include "gradient_engine.hpp"

#include <cmath>
#include <utility>

#include "../../cpu/reduce/squared_norm.hpp"

namespace atoll_kernels {

std::size_t GradientEngine::add_tensor(TensorSettings settings) {
    if (!error_feedback_) settings.residual = nullptr;
    return add(settings, 1, false);
}

void GradientEngine::compress(std::int64_t sync_round, std::size_t tensor, Gradient gradient) {
    queue_part(sync_round, at(tensor), std::move(gradient));
}

void GradientEngine::apply(std::int64_t sync_round, OptimizerStep step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_order(sync_round);
    check_step(step);
    RoundUpdate round_update;
    if (step.clip_norm > 0) {
        round_update.squares.resize(tensors_.size());
        round_update.squares_missing = tensors_.size();
    }
    round_update.step = std::move(step);
    order_round_update(sync_round, std::move(round_update));
}

void GradientEngine::accumulate(std::int64_t sync_round) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_order(sync_round);
    order_round_update(sync_round, {});
}

void GradientEngine::check_step(const OptimizerStep& step) const {
    for (const auto& tensor : tensors_) {
        if (tensor->group >= step.groups.size()) {
            refuse("groups has " + std::to_string(step.groups.size()) + " entries, but tensor " +
                   std::to_string(tensor->number) + " is of group " + std::to_string(tensor->group) +
                   "; pass hyperparameters for every group");
        }
        const bool needs_first = step.groups[tensor->group].momentum_or_beta1 != 0;
        if (needs_first && !tensor->weights.has_first())
            refuse("momentum of tensor " + std::to_string(tensor->number) +
                   " needs `first`, which it was added without");
    }
}

void GradientEngine::snapshot_residual(std::int64_t sync_round, std::size_t tensor, float* out,
                                       std::shared_ptr<const void> out_owner) {
    check_newest(sync_round, tensor);
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.residual_mutex);
    t.residual_snapshot = ResidualSnapshot(sync_round, t.residual, out, t.weights.entries(), std::move(out_owner));
}

Selected GradientEngine::choose_part(Tensor& tensor, std::int64_t sync_round, const Gradient& gradient,
                                     Scratch& scratch, DriftSquares&) {
    const Format format = format_of(tensor, sync_round);
    return gradient.chosen != nullptr ? tensor.selector.encode(gradient, format, scratch)
                                      : tensor.selector.select(gradient, format, scratch);
}

EncodedPart GradientEngine::encode_sum(Tensor& tensor, std::int64_t sync_round, const Units& sum, Scratch& scratch) {
    const Format format = format_of(tensor, sync_round);
    if (!islands_.leads() || tensor.residual == nullptr) return encode_part(format, sum, nullptr, scratch);
    const std::lock_guard<std::mutex> lock(tensor.residual_mutex);
    EncodedPart sent = encode_part(format, sum, tensor.residual, scratch);
    if (tensor.residual_snapshot.misses(sync_round))
        tensor.residual_snapshot.add(minus(sum, sent.part->units()).units());
    return sent;
}

void GradientEngine::take_total(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>& sums,
                                const Units& total, RoundUpdate& round_update) {
    const bool accumulate = !round_update.step.has_value();
    if (!accumulate && round_update.step->clip_norm <= 0) return advance(tensor, round_update, sync_round, &total);
    const double begun_s = processor_s();
    const double square =
        accumulate ? 0 : squared_norm(total.values, total.count * block_entries, 1, best_path());
    SharedPart kept = sums.size() == 1 ? sums.front() : copied(total);
    const double sum_s = processor_s() - begun_s;
    std::unique_lock<std::mutex> state_lock(mutex_);
    stats_.sum_s += sum_s;
    if (accumulate) {
        tensor.accumulated = std::move(kept);
        state_lock.unlock();
        return advance(tensor, round_update, sync_round, nullptr);
    }
    tensor.total = std::move(kept);
    round_update.squares[tensor.number] = square;
    if (--round_update.squares_missing == 0) scale_is_known(sync_round, round_update);
}

void GradientEngine::scale_is_known(std::int64_t sync_round, RoundUpdate& round_update) {
    double square = 0;
    for (const double one : round_update.squares) square += one;
    const double norm = std::sqrt(square), limit = round_update.step->clip_norm;
    if (norm > limit) round_update.scale = limit / (norm + 1e-6);
    for (const auto& tensor : tensors_) {
        const auto total = std::make_shared<SharedPart>(std::exchange(tensor->total, nullptr));
        push(*tensor, sync_round, [this, &t = *tensor, &round_update, sync_round, total](Scratch&) {
            const Units units = (*total)->units();
            advance(t, round_update, sync_round, &units);
        });
    }
}

void GradientEngine::update(Tensor& tensor, const RoundUpdate& round_update, std::int64_t, const Units& total) {
    const OptimizerStep& step = *round_update.step;
    const ParameterGroup& group = step.groups[tensor.group];
    tensor.weights.update(total, {.rule = tensor.rule,
                                  .lr = group.lr,
                                  .weight_decay = group.weight_decay,
                                  .momentum_or_beta1 = group.momentum_or_beta1,
                                  .beta2 = group.beta2,
                                  .epsilon = group.epsilon,
                                  .scale = step.maximize ? -round_update.scale : round_update.scale,
                                  .step = step.number});
}

Part GradientEngine::take_changed(Tensor& tensor) {
    Part part(tensor.weights.changed_blocks());
    tensor.weights.take_changes(part.index.get(), part.values.get());
    return part;
}

}  // namespace atoll_kernels
