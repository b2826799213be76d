// Exchanging updates: what is refused there, how a part is selected from live weights, and what is not sent yet.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "../cpu/difference.hpp"
#include "pipeline.hpp"

namespace atoll_kernels {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// The master as live would have it if live lacked nothing; the end puts the very bits back.
class Shifted {
  public:
    Shifted(Weights& weights, std::vector<Lacking> lacking, Scratch& scratch)
        : weights_(weights), lacking_(std::move(lacking)) {
        std::size_t blocks = 0;
        for (const Lacking& one : lacking_) blocks += one.units.count;
        saved_ = scratch.saved.of(blocks * block_entries);  // before anything is written: it may throw
        for (const Lacking& one : lacking_) {
            weights_.shift(one.units, -one.factor, saved_);
            saved_ += one.units.count * block_entries;
        }
    }
    Shifted(const Shifted&) = delete;
    Shifted& operator=(const Shifted&) = delete;
    ~Shifted() {
        for (auto one = lacking_.rbegin(); one != lacking_.rend(); ++one) {  // backwards: blocks may be in several
            saved_ -= one->units.count * block_entries;
            weights_.put_back(one->units, saved_);
        }
    }

  private:
    Weights& weights_;
    const std::vector<Lacking> lacking_;
    float* saved_ = nullptr;
};

}  // namespace

void Pipeline::check_tensor_of_updates(const TensorSettings& settings) const {
    const Parameters& p = settings.parameters;
    if (settings.rule == Rule::sgd && p.first == nullptr && p.last_step == nullptr && settings.residual == nullptr) return;
    refuse("exchanging updates, each rank's own optimizer has the moments and live has what is owed; pass rule 'sgd', and "
           "None for residual, first, second and last_step");
}

void Pipeline::check_plan_of_updates(const Update* update) const {
    if (update == nullptr)
        refuse("carry makes no sense exchanging updates: they are in live already; accumulate before the optimizer");
    if (update->clip_norm > 0)
        refuse("clip_norm makes no sense exchanging updates: they are in live already; clip before the optimizer");
    const auto plain = [](const Group& group) {
        return group.lr == 1 && group.weight_decay == 0 && group.momentum_or_beta1 == 0;
    };
    if (update->maximize || !std::all_of(update->groups.begin(), update->groups.end(), plain))
        refuse("exchanging updates, the masters take them as they are; pass lr 1, no decay, no momentum, not maximize");
}

bool Pipeline::await_compressed(Clock::time_point until) {
    std::unique_lock<std::mutex> lock(books_);
    const auto quiet = [](const auto& tensor) { return !tensor->compressing; };
    const auto over = [&] { return closed_ || failed_ || std::all_of(tensors_.begin(), tensors_.end(), quiet); };
    const bool in_time = changed_.wait_until(lock, until, over);
    check_open();
    if (failed_ && lost_) throw PeerIsLost(failure_);
    if (failed_) throw std::runtime_error(failure_);
    return in_time;
}

Selected Pipeline::compress_live(Tensor& tensor, std::int64_t step, const Gradient& live, Scratch& scratch) {
    const std::lock_guard<std::mutex> lock(tensor.updating);
    Selected own;
    {
        const Shifted shifted(tensor.weights, tensor.account.lacking(live.takes), scratch);
        own = tensor.selector.select(
            Copies{tensor.weights.master(), live.data, live.format, 1 / ranks(), live.keep_blocks},
            format_of(tensor, step), scratch);
    }
    tensor.account.forget(live.takes);
    tensor.account.note(step, own.written.part, ranks());
    return own;
}

// Unlike compress_live it leaves the masters alone, even for a moment: it runs while tasks are quiesced, and then they
// may be read.
std::size_t Pipeline::owed(std::size_t tensor, const Live& live, float* out) {
    {
        const std::lock_guard<std::mutex> lock(books_);
        check_open();
    }
    Tensor& t = at(tensor);
    const std::size_t n = t.weights.entries();
    const float scale = 1 / ranks();
    {
        const std::lock_guard<std::mutex> lock(t.updating);
        difference({t.weights.master(), live.data, live.format, scale, n}, out, best_path());
        for (const auto& [units, factor] : t.account.lacking(t.account.takes())) {
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

}  // namespace atoll_kernels
