#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "islands.hpp"
#include "kept.hpp"
#include "ledger.hpp"
#include "live_account.hpp"
#include "outbox.hpp"
#include "parts.hpp"
#include "selector.hpp"
#include "task_queue.hpp"
#include "weights.hpp"

// Compress, exchange, sum, update, publish: what one rank does with each tensor in each step, as tasks of one queue.
// The ranks' masters stay equal, bit for bit: all apply the same sums in the same order.
//
// Locks: books_ guards what is known about tensors and steps and is held for moments only. Each tensor has a lock for its
// residual and selector, `owed`, and one for its weights, `updating`, held while a kernel works on them; who needs both
// takes them in this order. None is taken while books_ is held, nor books_ while one is.
namespace atoll_kernels {

// Wrong arguments are std::invalid_argument; nothing is changed then.
struct PeerIsLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Settings {
    int rank;
    std::vector<std::vector<int>> islands;
    int threads;
    Policy policy;
    ValueFormat values;
    SelectionRule selection;
    bool error_feedback;
    std::int64_t digest_every;  // 0: never
    std::uint64_t seed;
    std::int64_t first_step;
    bool updates;  // what is exchanged: false gradients, true each rank's own updates
};

struct TensorSettings {
    std::int64_t order;
    Rule rule;
    Parameters parameters;
    float* residual;  // may be null without error feedback
    std::size_t group;
};

struct Group {
    double lr, weight_decay, momentum_or_beta1, beta2, epsilon;
};

// The optimizer's step for one step of the job.
struct Update {
    std::int32_t number;  // from 1
    std::vector<Group> groups;
    bool maximize;
    double clip_norm;  // 0: none
};

struct Fetched {
    std::int64_t version;  // the lowest
    std::size_t fresh;     // tensors that are newer than was asked for
};

struct OwnPart {
    std::int64_t step;
    std::size_t tensor;
    Part part;
};

struct Digest {
    std::int64_t step;
    std::size_t tensor;
    std::uint64_t value;
};

struct Stats {
    double compress_s = 0, sum_s = 0, update_s = 0, publish_s = 0, stall_s = 0;
    std::uint64_t kept_blocks = 0, found_blocks = 0, all_blocks = 0, nonfinite_blocks = 0, payload_bytes = 0;
    QueueStats queue;
};

class Pipeline {
  public:
    static constexpr std::size_t recent_steps = 4;

    explicit Pipeline(Settings settings);
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;
    ~Pipeline() { close(); }

    std::size_t add_tensor(const TensorSettings& settings);
    void close();

    int event() const { return outbox_.event(); }
    std::vector<Outgoing> take_outgoing(std::size_t limit);
    const char* deliver(MessageKind kind, std::uint64_t origin, std::uint64_t step, std::uint64_t tensor,
                        std::uint64_t count, const unsigned char* data, std::size_t bytes);

    bool exchanges_updates() const { return settings_.updates; }
    bool feeds_back() const { return settings_.error_feedback; }
    std::size_t entries(std::size_t tensor) const { return at(tensor).weights.entries(); }
    const Live& live(std::size_t tensor) const { return at(tensor).weights.live(); }
    void compress(std::int64_t step, std::size_t tensor, Gradient gradient);
    void apply(std::int64_t step, Update update);
    void carry(std::int64_t step);

    // True when all of `tensors` are at `step` or later, false if one is not at `until`. Throws PeerIsLost after fail.
    bool await(std::span<const std::size_t> tensors, std::int64_t step, Clock::time_point until);
    std::string waiting(std::span<const std::size_t> tensors, std::int64_t step) const;
    std::vector<std::string> waiting_for(std::size_t limit) const;
    // True when nothing waits to be compressed any more.
    bool await_compressed(Clock::time_point until);
    void note_stall(Clock::duration waited);

    Fetched publish(std::span<const std::size_t> tensors, std::int64_t step);

    // The changed blocks, and the version they are of.
    std::pair<std::int64_t, Part> take_changes(std::size_t tensor);
    void check_fetchable(std::span<const std::size_t> tensors, bool with_live) const;

    // out [entries]: what this rank has in its own weights and has not sent. live: those weights. Returns how many blocks
    // are not finite; they are 0 in out, for they are never sent.
    std::size_t owed(std::size_t tensor, const Live& live, float* out);

    // `ranges` of memory that updates of `tensor` change get copied as they are at `step`, which is not older than its
    // version: by take_kept, or before a later one changes them. Whatever was kept before is forgotten.
    void keep(std::int64_t step, std::size_t tensor, std::vector<KeptRange> ranges);

    // The same of what this rank owes after its part of `step`, the newest that was begun, into out [entries].
    // Exchanging updates, at once: live as for owed, after await_compressed and before the next update of live.
    std::size_t keep_owed(std::int64_t step, std::size_t tensor, const Live& live, float* out,
                          std::shared_ptr<const void> out_owner);

    // True when what was kept of `tensor` at `step` is whole; false if the step is not there at `until`.
    bool take_kept(std::size_t tensor, std::int64_t step, Clock::time_point until);

    std::vector<std::int64_t> versions() const;
    std::vector<OwnPart> recent_parts() const;
    std::vector<Digest> take_digests();
    Stats take_stats();

    void fail(const std::string& reason);
    bool quiesce(Clock::time_point until);
    void resume();
    bool idle(Clock::time_point until);

  private:
    struct Own {
        std::int64_t step;
        std::size_t count;
        SharedPayload payload;
    };

    struct Tensor {
        Tensor(std::size_t tensor, const TensorSettings& settings, const Settings& all, const Islands& islands);

        const std::size_t number;
        const std::int64_t order;
        const Rule rule;
        const std::size_t group;
        float* const residual;

        std::mutex owed;  // guards what the residual points to, the selector, and what is kept of the former
        Selector selector;
        KeptOwed kept_owed;

        std::mutex updating;  // guards weights, their version and what is kept of them
        Weights weights;
        std::int64_t weights_version;
        LiveAccount account;  // used where updates are exchanged
        KeptRanges kept;

        // Guarded by books_.
        Ledger ledger;
        std::deque<std::pair<std::int64_t, Gradient>> gradients;  // waiting to be compressed, oldest first
        bool compressing = false;
        std::deque<Own> recent;
        SharedPart carried;  // of steps without an update
        SharedPart total;    // of the step after the version, while the norm of all is awaited
    };

    // What is to be done with the sums of one step.
    struct Plan {
        std::optional<Update> update;  // none: carry
        double scale = 1;
        std::vector<double> squares;     // of each tensor's total, for clipping
        std::size_t squares_missing = 0;
        std::size_t open = 0;            // tensors that this step is not closed for
    };

    Tensor& at(std::size_t tensor) const;
    Format format_of(const Tensor& tensor, std::int64_t step) const;
    void check_open() const;
    void check_plan(std::int64_t step, const Update* update) const;
    void check_tensor_of_updates(const TensorSettings& settings) const;
    void check_plan_of_updates(const Update* update) const;
    void put_plan(std::int64_t step, Plan plan);
    const char* refusal(MessageKind kind, std::uint64_t origin, std::uint64_t step, std::uint64_t tensor,
                        std::uint64_t count, std::size_t bytes) const;
    std::string waits(const Tensor& tensor) const;
    void break_down(const std::string& what);

    // With books_ held: notes of what is done, and the tasks that follow from it.
    void push(const Tensor& tensor, std::int64_t step, TaskQueue::Task task);
    void push_compress(Tensor& tensor);
    void send(MessageKind kind, const Tensor& tensor, std::int64_t step, std::size_t count, SharedPayload payload);
    void part_is_here(Tensor& tensor, std::int64_t step, std::size_t place, Written own);
    void own_sum_is_here(Tensor& tensor, std::int64_t step, Written sum);
    void settle_if_ready(Tensor& tensor);
    void close_step(Tensor& tensor, std::int64_t step);
    void scale_is_known(std::int64_t step, Plan& plan);
    void give_up(std::string reason, bool lost);

    // Tasks (tasks.cpp), without any lock at first.
    void run_compress(Tensor& tensor, Scratch& scratch);
    Selected compress_live(Tensor& tensor, std::int64_t step, const Gradient& live, Scratch& scratch);
    void run_read(Tensor& tensor, MessageKind kind, std::size_t origin, std::int64_t step, std::size_t count,
                  const Payload& payload);
    void run_sum(Tensor& tensor, std::int64_t step, Scratch& scratch);
    void run_settle(Tensor& tensor, std::int64_t step, const std::vector<SharedPart>& sums, Scratch& scratch);
    void advance(Tensor& tensor, const Plan& plan, std::int64_t step, const Units* total);  // total null: carried
    float ranks() const { return static_cast<float>(ranks_); }
    Rates rates_of(const Tensor& tensor, const Plan& plan) const;

    const Settings settings_;
    const Islands islands_;
    const std::size_t ranks_;

    mutable std::mutex books_;  // guards what follows
    std::condition_variable changed_;
    std::vector<std::unique_ptr<Tensor>> tensors_;
    bool begun_ = false;
    bool closed_ = false;
    std::int64_t planned_;  // the newest step that was applied or carried
    std::map<std::int64_t, Plan> plans_;
    Outbox outbox_;
    std::vector<Digest> digests_;
    Stats stats_;
    std::string failure_;
    bool failed_ = false;
    bool lost_ = false;  // the failure is a peer's

    TaskQueue queue_;  // the last member: its threads use the others
};

}  // namespace atoll_kernels
