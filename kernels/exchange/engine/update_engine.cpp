// What is refused, how a part is selected from live weights, how they get others' parts, and what is not sent yet.
#include <algorithm>
#include <ranges>
#include <stdexcept>
#include <utility>

#include "../../cpu/select/difference.hpp"
#include "update_engine.hpp"

namespace atoll_kernels {
namespace {

// The shared parameter as live would have it if live lacked nothing; the end puts the very bits back.
class Shifted {
  public:
    Shifted(Weights& weights, std::vector<PendingUpdate> pending, Scratch& scratch)
        : weights_(weights), pending_(std::move(pending)) {
        std::size_t blocks = 0;
        for (const PendingUpdate& one : pending_) blocks += one.units.count;
        saved_ = scratch.saved.of(blocks * block_entries);  // before anything is written: it may throw
        for (const PendingUpdate& one : pending_) {
            weights_.shift(one.units, -one.factor, saved_);
            saved_ += one.units.count * block_entries;
        }
    }
    Shifted(const Shifted&) = delete;
    Shifted& operator=(const Shifted&) = delete;
    ~Shifted() {
        for (auto one = pending_.rbegin(); one != pending_.rend(); ++one) {  // backwards: blocks may be in several
            saved_ -= one->units.count * block_entries;
            weights_.put_back(one->units, saved_);
        }
    }

  private:
    Weights& weights_;
    const std::vector<PendingUpdate> pending_;
    float* saved_ = nullptr;
};

}  // namespace

std::size_t UpdateEngine::add_tensor(const TensorSettings& settings) {
    check_aggregator(settings);
    return add(settings, every_, true);
}

void UpdateEngine::check_aggregator(const TensorSettings& settings) const {
    if (settings.turn < 0 || settings.turn >= every_)
        refuse("turn = " + std::to_string(settings.turn) + " is not in 0.." + std::to_string(every_ - 1));
    if (!settings.aggregator.has_value()) {
        if (settings.aggregator_sum != nullptr)
            refuse("aggregator_sum makes no sense without an aggregator; pass None");
        return;
    }
    if (*settings.aggregator >= islands_.members.size())
        refuse("aggregator = " + std::to_string(*settings.aggregator) + " is none of the " +
               std::to_string(islands_.members.size()) + " islands");
    const bool mine = *settings.aggregator == islands_.mine && islands_.leads();
    if (mine != (settings.aggregator_sum != nullptr))
        refuse(mine ? "this rank aggregates the tensor, but aggregator_sum is None; pass zeros, as long as shared_param"
                    : "aggregator_sum is given, but the tensor is another's; pass None");
}

void UpdateEngine::sum_updates(std::int64_t sync_round, float weight, std::span<const std::size_t> k_blocks,
                                 std::span<const std::size_t> aggregator_blocks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_order(sync_round);
    if (k_blocks.size() != tensors_.size() || aggregator_blocks.size() != tensors_.size()) {
        refuse("k_blocks has " + std::to_string(k_blocks.size()) + " entries and aggregator_blocks " +
               std::to_string(aggregator_blocks.size()) + ", but there are " + std::to_string(tensors_.size()) +
               " tensors; pass one for each");
    }
    const bool follows = islands_.follows();
    const auto begins = [sync_round, follows](const auto& tensor) {  // here, not in compress
        return follows || tensor->weights.has_live() || !tensor->rounds.is_due(sync_round);
    };
    for (const auto& tensor : tensors_ | std::views::filter(begins)) check_compress(sync_round, *tensor);
    for (const auto& tensor : tensors_) {
        tensor->aggregator_blocks = aggregator_blocks[tensor->number];
        if (!begins(tensor)) continue;
        const Live& live = tensor->weights.live();
        if (tensor->rounds.is_due(sync_round) && !follows) {
            begin_compress(sync_round, *tensor, {live.data, live.format, weight, k_blocks[tensor->number]});
        } else {
            tensor->rounds.begin_round();
        }
    }
    order_round_update(sync_round, {});
}

void UpdateEngine::change_turns(std::int64_t sync_round, std::int64_t every, std::span<const std::int64_t> turns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_order(sync_round);
    if (turns.size() != tensors_.size())
        refuse("turns has " + std::to_string(turns.size()) + " entries, but there are " +
               std::to_string(tensors_.size()) + " tensors; pass one for each");
    for (const std::int64_t turn : turns) {
        if (turn < 0 || turn >= every)
            refuse("turn = " + std::to_string(turn) + " is not in 0.." + std::to_string(every - 1));
    }
    for (const auto& tensor : tensors_) tensor->rounds.change({sync_round, every, turns[tensor->number]});
}

void UpdateEngine::compress_live(std::int64_t sync_round, std::size_t tensor, Gradient gradient) {
    Tensor& t = at(tensor);
    if (islands_.follows()) refuse("this rank follows its island's leader, which sends for it; call sum_updates alone");
    if (gradient.chosen == nullptr && !t.weights.has_live()) note_copy(sync_round, t, gradient);
    queue_part(sync_round, t, std::move(gradient));
}

Selected UpdateEngine::choose_part(Tensor& tensor, std::int64_t sync_round, const Gradient& live, Scratch& scratch,
                                   DriftSquares& drift) {
    const std::lock_guard<std::mutex> lock(tensor.weights_mutex);
    if (std::exchange(tensor.weight, live.weight) != live.weight) tensor.drift.forget();
    Selected own;
    if (live.chosen != nullptr) {
        tensor.drift.before(live.sample);
        own = tensor.selector.encode(live, format_of(tensor, sync_round), scratch);
    } else {
        const Shifted shifted(tensor.weights, tensor.pending.missing_from_copy(live.takes), scratch);
        const Difference unsent{tensor.weights.shared_param(), live.data, live.format, live.weight,
                                tensor.weights.entries(), tensor.rounding.lost()};
        tensor.drift.before(unsent);
        own = tensor.selector.select(unsent, live.k_blocks, format_of(tensor, sync_round), scratch);
    }
    drift = tensor.drift.after(own.encoded.part->units());
    tensor.pending.forget(live.takes);
    tensor.pending.add(sync_round, own.encoded.part, 1 / live.weight);
    return own;
}

EncodedPart UpdateEngine::encode_sum(Tensor& tensor, std::int64_t sync_round, const Units& sum, Scratch& scratch) {
    EncodedPart sent = encode_part(format_of(tensor, sync_round), sum, nullptr, scratch);
    if (islands_.leads() && settings_.values != WireValues::float32) {
        auto lost = std::make_shared<const Part>(minus(sum, sent.part->units()));
        const std::lock_guard<std::mutex> residual_lock(tensor.residual_mutex);
        const std::lock_guard<std::mutex> lock(tensor.weights_mutex);
        if (tensor.residual_snapshot.misses(sync_round)) tensor.residual_snapshot.add(lost->units());
        tensor.pending.add(sync_round, std::move(lost), -1 / tensor.weight);
    }
    return sent;
}

// The shared parameters take the sum as it is.
void UpdateEngine::update(Tensor& tensor, const RoundUpdate&, std::int64_t sync_round, const Units& total) {
    tensor.weights.update(total, {.rule = Rule::sgd,
                                  .lr = 1,
                                  .weight_decay = 0,
                                  .momentum_or_beta1 = 0,
                                  .beta2 = 0,
                                  .epsilon = 0,
                                  .scale = 1,
                                  .step = 1});
    if (!islands_.follows()) tensor.pending.close_round(sync_round, total);
}

void UpdateEngine::publish_live(Tensor& tensor) {
    tensor.rounding.add(tensor.weights.live(), tensor.pending.unpublished().units());
    tensor.pending.mark_published();
}

Part UpdateEngine::take_changed(Tensor& tensor) {
    Part part = tensor.pending.take();
    tensor.pending.note_taken(tensor.rounding.add_to_copy(part));
    return part;
}

// What Shifted makes of the shared parameter, entry by entry in the same order, of a copy of the blocks that may have
// changed.
Part UpdateEngine::take_reference(std::size_t tensor) {
    require_open();
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.weights_mutex);
    const std::vector<PendingUpdate> pending = t.pending.missing_from_copy(t.pending.takes());
    for (const PendingUpdate& one : pending) t.weights.mark_changed(one.units);
    Part reference(t.weights.changed_blocks());
    t.weights.take_changes(reference.index.get(), reference.values.get());
    for (const auto& [units, factor] : pending) {
        const float shift = -factor;
        std::size_t at = 0;
        for (std::size_t k = 0; k < units.count; ++k) {
            while (reference.index[at] != units.index[k]) ++at;  // it is there, and both ascend
            for (std::size_t i = 0; i < block_entries; ++i)
                reference.values[at * block_entries + i] += shift * units.values[k * block_entries + i];
        }
        t.weights.mark_changed(units);  // what is pending now is not the next time
    }
    return reference;
}

void UpdateEngine::note_copy(std::int64_t sync_round, Tensor& tensor, const Gradient& live) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        check_open();
        check_compress(sync_round, tensor);
    }
    const std::lock_guard<std::mutex> lock(tensor.weights_mutex);
    tensor.rounding.note_copy({const_cast<void*>(live.data), live.format});
}

void UpdateEngine::set_live(std::size_t tensor, const Live& live, const float* residual, float weight) {
    require_open();
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.weights_mutex);
    t.weight = weight;
    t.drift.forget();
    t.rounding.set(live, t.weights.shared_param(), residual, 1 / weight);
    if (!t.weights.has_live()) {
        t.rounding.note_copy(live);
        t.weights.forget_changes();
    }
    t.pending.mark_published();
}

// Unlike choose_part it leaves the shared parameters alone, even for a moment: it runs while tasks are quiesced, and
// then they may be read.
std::size_t UpdateEngine::read_residual(std::size_t tensor, const Live& live, float* out) {
    require_open();
    Tensor& t = at(tensor);
    const std::size_t n = t.weights.entries();
    {
        const std::lock_guard<std::mutex> lock(t.weights_mutex);
        const float scale = t.weight;
        difference({t.weights.shared_param(), live.data, live.format, scale, n, t.rounding.lost()}, out, best_path());
        for (const auto& [units, factor] : t.pending.missing_from_copy(t.pending.takes())) {
            for (std::size_t k = 0; k < units.count; ++k) {
                const std::size_t begin = units.index[k] * block_entries, end = std::min(n, begin + block_entries);
                for (std::size_t i = begin; i < end; ++i)
                    out[i] -= scale * factor * units.values[k * block_entries + i - begin];
            }
        }
    }
    std::size_t nonfinite = 0;
    for (std::size_t begin = 0; begin < n; begin += block_entries) {
        const std::size_t size = std::min(block_entries, n - begin);
        if (all_finite(out + begin, size)) continue;
        std::fill_n(out + begin, size, 0.0F);
        ++nonfinite;
    }
    return nonfinite;
}

std::size_t UpdateEngine::snapshot_residual(std::int64_t sync_round, std::size_t tensor, const Live& live, float* out,
                                            std::shared_ptr<const void> out_owner) {
    check_newest(sync_round, tensor);
    Tensor& t = at(tensor);
    const std::lock_guard<std::mutex> lock(t.residual_mutex);
    const std::size_t nonfinite = read_residual(tensor, live, out);
    t.residual_snapshot = ResidualSnapshot(sync_round, nullptr, out, t.weights.entries(), std::move(out_owner));
    return nonfinite;
}

}  // namespace atoll_kernels
