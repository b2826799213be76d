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

#include "../parts/drift.hpp"
#include "../parts/parts.hpp"
#include "../parts/selector.hpp"
#include "../queue/outbox.hpp"
#include "../queue/task_queue.hpp"
#include "../weights/live_rounding.hpp"
#include "../weights/pending_updates.hpp"
#include "../weights/snapshot.hpp"
#include "../weights/weights.hpp"
#include "islands.hpp"
#include "round_tracker.hpp"

// Base of both protocols, GradientEngine and UpdateEngine: what one rank does with each tensor in each sync round, as
// tasks of one queue. It compresses, exchanges, sums, updates and publishes. The ranks' shared parameters stay equal,
// bit for bit: all apply the same sums in the same order. A protocol chooses a part, and takes in a total.
//
// Locks: mutex_ guards what is known about tensors and rounds and is held for moments only. Each tensor has
// residual_mutex for its residual and selector, and weights_mutex for its weights, held while a kernel works on them;
// who needs both takes them in this order. None is taken while mutex_ is held, nor mutex_ while one is.
namespace atoll_kernels {

// Wrong arguments are std::invalid_argument; nothing is changed then.
struct PeerIsLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Settings {
    int rank;
    std::vector<std::vector<int>> islands;
    int threads;
    WireValues values;
    SelectionRule selection;
    std::int64_t digest_every;  // 0: never
    std::uint64_t seed;
    std::int64_t first_round;
};

struct ParameterGroup {
    double lr, weight_decay, momentum_or_beta1, beta2, epsilon;
};

// One step of the optimizer.
struct OptimizerStep {
    std::int32_t number;  // from 1: for bias correction and last_step
    std::vector<ParameterGroup> groups;
    bool maximize;
    double clip_norm;  // 0: none
};

struct TensorSettings {
    std::int64_t order;
    Rule rule;
    Parameters parameters;
    float* residual;  // may be null without error feedback
    std::size_t group;
    std::int64_t turn = 0;             // the tensor's rounds are turn, turn + every, ...
    std::optional<std::size_t> aggregator{};  // the island that sums; none: everybody
    float* aggregator_sum = nullptr;  // [n] on the aggregator's leader: the ranks' sums less the shared parameters
};

struct Fetched {
    std::int64_t version;  // the lowest
    std::size_t fresh;     // tensors that are newer than was asked for
};

struct Change {
    std::int64_t version;
    Part part;
};

struct OwnPart {
    MessageKind kind;  // part, or from_aggregator
    std::int64_t sync_round;
    std::size_t tensor;
    Part part;
};

struct Digest {
    std::int64_t sync_round;
    std::size_t tensor;
    std::uint64_t value;
};

struct Stats {
    double compress_s = 0, sum_s = 0, update_s = 0, publish_s = 0, stall_s = 0;
    std::uint64_t chosen_blocks = 0, found_blocks = 0, all_blocks = 0, nonfinite_blocks = 0, payload_bytes = 0;
    DriftSquares drift;
    std::uint64_t rounds = 0;  // that were closed of all tensors
    double rounds_s = 0;       // from their begins, added up
    QueueStats queue;
};

// kernels/_native.pyi documents what the engines' public methods do.
class ExchangeEngine {
  public:
    ExchangeEngine(const ExchangeEngine&) = delete;
    ExchangeEngine& operator=(const ExchangeEngine&) = delete;
    virtual ~ExchangeEngine() = default;

    void close();

    int event() const { return outbox_.event(); }
    std::vector<Outgoing> take_outgoing(std::size_t limit);
    const char* deliver(MessageKind kind, std::uint64_t origin, std::uint64_t sync_round, std::uint64_t tensor,
                        std::uint64_t count, const unsigned char* data, std::size_t bytes);

    std::size_t entries(std::size_t tensor) const { return at(tensor).weights.entries(); }
    std::uint64_t selection_seed(std::int64_t sync_round, std::size_t tensor) const {
        return format_of(at(tensor), sync_round).seed;
    }

    void remember(std::size_t rounds);
    // True when all of `tensors` are at `sync_round` or later, false if one is not at `until`. Throws PeerIsLost after
    // fail.
    bool await(std::span<const std::size_t> tensors, std::int64_t sync_round, Clock::time_point until);
    std::string waiting(std::span<const std::size_t> tensors, std::int64_t sync_round) const;
    // True when nothing of these tensors waits to be compressed any more; none given: of all.
    bool await_compressed(std::span<const std::size_t> tensors, Clock::time_point until);
    void note_stall(Clock::duration waited);

    Fetched publish(std::span<const std::size_t> tensors, std::int64_t sync_round);

    // Of each tensor the changed blocks, and the version they are of.
    std::vector<Change> take_changes(std::span<const std::size_t> tensors);
    void check_fetchable(std::span<const std::size_t> tensors, bool with_live) const;

    void snapshot(std::int64_t sync_round, std::size_t tensor, std::vector<SnapshotRange> ranges);

    // True when the snapshots of `tensors` at `sync_round` are whole; false if the round is not there at `until`.
    bool await_snapshot(std::span<const std::size_t> tensors, std::int64_t sync_round, Clock::time_point until);

    std::vector<std::int64_t> versions() const;
    void read_shared_param(std::size_t tensor, float* out);
    std::vector<OwnPart> recent_parts() const;
    std::vector<Digest> take_digests();
    Stats take_stats();

    void fail(const std::string& reason);
    bool quiesce(Clock::time_point until);
    void resume();
    bool idle(Clock::time_point until);

  protected:
    struct Own {
        MessageKind kind;
        std::int64_t sync_round;
        std::size_t count;
        SharedPayload payload;
    };

    struct Tensor {
        Tensor(std::size_t tensor, const TensorSettings& settings, const Settings& all, const Islands& islands,
               std::int64_t every, bool samples);

        const std::size_t number;
        const std::int64_t order;
        const Rule rule;
        const std::size_t group;
        float* const residual;

        std::mutex residual_mutex;  // guards what the residual points to, its snapshot, and the selector
        Selector selector;
        ResidualSnapshot residual_snapshot;

        std::mutex weights_mutex;  // guards weights, their version and their snapshot
        Weights weights;
        std::int64_t weights_version;
        // Of UpdateEngine.
        PendingUpdates pending;
        LiveRounding rounding;
        Drift drift;
        float* const aggregator_sum;  // null: this rank does not own the tensor
        Selector aggregator_selector;
        float weight = 1;  // of this rank's updates in the shared parameters, in the round that was compressed last
        StateSnapshot snapshot;

        // Guarded by mutex_.
        RoundTracker rounds;
        std::deque<std::pair<std::int64_t, Gradient>> gradients;  // waiting to be compressed, oldest first
        bool compressing = false;
        std::deque<Own> recent, recent_totals;
        std::size_t aggregator_blocks = 1;
        // Of GradientEngine.
        SharedPart accumulated;  // of rounds without an update
        SharedPart total;        // of the round after the version, while the norm of all is awaited
    };

    // The work to be done with the sums of one sync round.
    struct RoundUpdate {
        // Of GradientEngine: no step, accumulate.
        std::optional<OptimizerStep> step;
        double scale = 1;
        std::vector<double> squares;  // of each tensor's total, for clipping
        std::size_t squares_missing = 0;
        std::size_t open = 0;  // tensors that this round is not closed for
        Clock::time_point begun = Clock::now();
    };

    // replicas: an island is one: its leader sends for all, the others' shared parameters follow.
    ExchangeEngine(Settings settings, bool replicas);

    // --- what a protocol does; a destructor of one calls close, so that no task is left that calls these

    // With residual_mutex held.
    virtual Selected choose_part(Tensor& tensor, std::int64_t sync_round, const Gradient& gradient, Scratch& scratch,
                                 DriftSquares& drift) = 0;
    // Encodes the island's sum. The leader alone takes back what rounding it takes away.
    virtual EncodedPart encode_sum(Tensor& tensor, std::int64_t sync_round, const Units& sum, Scratch& scratch) = 0;
    // Takes the total of `sums`, without any lock at first, and lets the tensor advance.
    virtual void take_total(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>& sums,
                            const Units& total, RoundUpdate& round_update) = 0;
    // With weights_mutex held.
    virtual void update(Tensor& tensor, const RoundUpdate& round_update, std::int64_t sync_round,
                        const Units& total) = 0;
    virtual void publish_live(Tensor& tensor) = 0;
    virtual Part take_changed(Tensor& tensor) = 0;

    // --- shared

    [[noreturn]] static void refuse(const std::string& why) { throw std::invalid_argument(why); }
    // samples: as Selector takes it. Of a tensor that is exchanged in each `every`-th round.
    std::size_t add(const TensorSettings& settings, std::int64_t every, bool samples);
    void queue_part(std::int64_t sync_round, Tensor& tensor, Gradient gradient);
    Tensor& at(std::size_t tensor) const;
    Format format_of(const Tensor& tensor, std::int64_t sync_round) const;
    void check_open() const;  // with mutex_ held
    void require_open() const;
    void check_failure() const;
    void check_compress(std::int64_t sync_round, const Tensor& tensor) const;
    void check_order(std::int64_t sync_round) const;
    void check_newest(std::int64_t sync_round, std::size_t tensor) const;
    const char* refusal(MessageKind kind, std::uint64_t origin, std::uint64_t sync_round, std::uint64_t tensor,
                        std::uint64_t count, std::size_t bytes) const;
    std::string waits(const Tensor& tensor) const;
    void break_down(const std::string& what);

    // With mutex_ held: notes of what is done, and the tasks that follow from it.
    void begin_compress(std::int64_t sync_round, Tensor& tensor, Gradient gradient);
    void order_round_update(std::int64_t sync_round, RoundUpdate round_update);
    void push(const Tensor& tensor, std::int64_t sync_round, TaskQueue::Task task);
    void push_compress(Tensor& tensor);
    void send(MessageKind kind, const Tensor& tensor, std::int64_t sync_round, std::size_t count,
              SharedPayload payload, int to = Outgoing::everyone);
    void part_is_here(Tensor& tensor, std::int64_t sync_round, std::size_t place, EncodedPart own);
    void own_sum_is_here(Tensor& tensor, std::int64_t sync_round, EncodedPart sum);
    void reduce_if_ready(Tensor& tensor);
    void close_round(Tensor& tensor, std::int64_t sync_round);
    void give_up(std::string reason, bool lost);

    // Tasks (tasks.cpp), without any lock at first.
    void run_compress(Tensor& tensor, Scratch& scratch);
    void run_read(Tensor& tensor, MessageKind kind, std::size_t origin, std::int64_t sync_round, std::size_t count,
                  const Payload& payload);
    void run_sum(Tensor& tensor, std::int64_t sync_round, Scratch& scratch);
    void run_own(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>& sums, Scratch& scratch);
    void run_reduce(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>& sums, Scratch& scratch);
    // total null: accumulated, or of a round that is not the tensor's
    void advance(Tensor& tensor, const RoundUpdate& round_update, std::int64_t sync_round, const Units* total);

    const Settings settings_;
    const Islands islands_;

    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::vector<std::unique_ptr<Tensor>> tensors_;
    bool begun_ = false;
    bool closed_ = false;
    std::size_t recent_rounds_ = 4;
    std::int64_t ordered_;  // the newest round whose update was ordered
    std::map<std::int64_t, RoundUpdate> round_updates_;
    Outbox outbox_;
    std::vector<Digest> digests_;
    Stats stats_;
    std::string failure_;
    bool failed_ = false;
    bool lost_ = false;  // the failure is a peer's

    TaskQueue queue_;  // the last member: its threads use the others
};

}  // namespace atoll_kernels
