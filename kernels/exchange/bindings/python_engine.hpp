#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../bindings/loaded.hpp"
#include "../engine/exchange_engine.hpp"
#include "arguments.hpp"
#include "deferred_release.hpp"

namespace atoll_kernels {

struct DeadlinePassed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The engine as Python has it: keeps the buffers alive, and knows the process it belongs to.
class PythonEngine {
  public:
    explicit PythonEngine(Settings settings)
        : process_(getpid()),
          deferred_(std::make_unique<DeferredRelease>()),
          core_(std::make_unique<ExchangeEngine>(std::move(settings))) {}
    PythonEngine(const PythonEngine&) = delete;
    PythonEngine& operator=(const PythonEngine&) = delete;

    ~PythonEngine() {
        if (forked()) {  // the threads are not here, and locks may be held by them for ever: leave all as it is
            (void)core_.release();
            (void)deferred_.release();
            return;
        }
        core_.reset();  // joins the threads, which never want the GIL; then the buffers may go
        deferred_.reset();
    }

    std::size_t add_tensor(std::int64_t order, const std::string& rule_name, nb::handle shared_param_object,
                           nb::handle residual_object, nb::handle first_object, nb::handle second_object,
                           nb::handle last_step_object, nb::handle live_object, std::int64_t group, std::int64_t turn,
                           std::optional<std::size_t> aggregator, nb::handle aggregator_sum_object);
    void close();
    int fileno() { return core().event(); }
    void compress(std::int64_t sync_round, std::size_t tensor, nb::handle gradient_object, double weight,
                  std::int64_t k_blocks);
    void compress_chosen(std::int64_t sync_round, std::size_t tensor, nb::handle index_object, nb::handle values_object,
                         std::size_t found, std::size_t nonfinite);
    void compress_chosen_live(std::int64_t sync_round, std::size_t tensor, nb::handle index_object,
                              nb::handle values_object, std::size_t found, std::size_t nonfinite,
                              nb::handle sample_object, double weight);
    nb::tuple take_reference(std::size_t tensor);
    nb::tuple drift_blocks(std::size_t tensor);
    void compress_live(std::int64_t sync_round, std::size_t tensor, nb::handle live_object, double weight,
                       std::int64_t k_blocks);
    void await_compressed(double deadline_s, const std::vector<std::size_t>& tensors);
    std::size_t read_residual(std::size_t tensor, nb::handle live_object, nb::handle out_object);
    void read_shared_param(std::size_t tensor, nb::handle out_object);
    void set_live(std::size_t tensor, nb::handle residual_object, double weight, nb::handle live_object);
    void snapshot(std::int64_t sync_round, std::size_t tensor,
                  const std::vector<std::tuple<nb::object, nb::object>>& ranges);
    std::size_t snapshot_residual(std::int64_t sync_round, std::size_t tensor, nb::handle live_object,
                                  nb::handle out_object);
    void await_snapshot(const std::vector<std::size_t>& tensors, std::int64_t sync_round, double deadline_s);
    void apply(std::int64_t sync_round, std::int64_t number, const std::vector<Hyperparameters5>& groups, bool maximize,
               double clip_norm);
    void accumulate(std::int64_t sync_round) { core().accumulate(sync_round); }
    void sum_updates(std::int64_t sync_round, double weight, const std::vector<std::int64_t>& k_blocks,
                     const std::vector<std::int64_t>& aggregator_blocks);
    void change_turns(std::int64_t sync_round, std::int64_t every, const std::vector<std::int64_t>& turns);
    void remember(std::size_t rounds) { core().remember(rounds); }
    nb::tuple fetch(const std::vector<std::size_t>& tensors, std::int64_t sync_round, double deadline_s);
    nb::tuple changes(const std::vector<std::size_t>& tensors, std::int64_t sync_round, double deadline_s);
    std::vector<std::int64_t> versions() { return core().versions(); }
    std::uint64_t selection_seed(std::int64_t sync_round, std::size_t tensor) {
        return core().selection_seed(sync_round, tensor);
    }
    nb::list take_outgoing(std::size_t limit);
    nb::object deliver(int kind, std::uint64_t origin, std::uint64_t sync_round, std::uint64_t tensor,
                       std::uint64_t count, nb::handle payload_object);
    void fail(const std::string& reason) { core().fail(reason); }
    void quiesce(double deadline_s);
    void resume() { core().resume(); }
    nb::list recent_parts();
    void idle(double deadline_s);
    nb::list digests();
    std::vector<std::string> waiting_for(std::size_t limit) { return core().waiting_for(limit); }
    nb::tuple take_stats();

  private:
    static Gradient chosen_elsewhere(ExchangeEngine& engine, std::size_t tensor, nb::handle index_object,
                                     nb::handle values_object, std::size_t found, std::size_t nonfinite);
    static Live live_for(ExchangeEngine& engine, std::size_t tensor, nb::handle object, std::optional<Loaded>& buffer,
                         Access access = Access::read);
    bool forked() const { return getpid() != process_; }
    ExchangeEngine& core();
    double await(ExchangeEngine& engine, const std::vector<std::size_t>& tensors, std::int64_t sync_round,
                 double deadline_s);

    const pid_t process_;
    std::vector<Loaded> owned_;
    std::unique_ptr<DeferredRelease> deferred_;
    std::unique_ptr<ExchangeEngine> core_;
};

}  // namespace atoll_kernels
