#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../loaded.hpp"
#include "arguments.hpp"
#include "graveyard.hpp"
#include "pipeline.hpp"

namespace atoll_kernels {

struct DeadlinePassed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The pipeline as Python has it: keeps the buffers alive, and knows the process it belongs to.
class NativePipeline {
  public:
    explicit NativePipeline(Settings settings)
        : process_(getpid()),
          graveyard_(std::make_unique<Graveyard>()),
          core_(std::make_unique<Pipeline>(std::move(settings))) {}
    NativePipeline(const NativePipeline&) = delete;
    NativePipeline& operator=(const NativePipeline&) = delete;

    ~NativePipeline() {
        if (forked()) {  // the threads are not here, and locks may be held by them for ever: leave all as it is
            (void)core_.release();
            (void)graveyard_.release();
            return;
        }
        core_.reset();  // joins the threads, which never want the GIL; then the buffers may go
        graveyard_.reset();
    }

    std::size_t add_tensor(std::int64_t order, const std::string& rule_name, nb::handle master_object,
                           nb::handle residual_object, nb::handle first_object, nb::handle second_object,
                           nb::handle last_step_object, nb::handle live_object, std::int64_t group);
    void close();
    int fileno() { return core().event(); }
    void compress(std::int64_t step, std::size_t tensor, nb::handle gradient_object, double weight,
                  std::int64_t keep_blocks);
    void compress_live(std::int64_t step, std::size_t tensor, nb::handle live_object, std::int64_t keep_blocks);
    void await_compressed(double deadline_s);
    std::size_t owed(std::size_t tensor, nb::handle live_object, nb::handle out_object);
    void keep(std::int64_t step, std::size_t tensor, const std::vector<std::tuple<nb::object, nb::object>>& ranges);
    std::size_t keep_owed(std::int64_t step, std::size_t tensor, nb::handle live_object, nb::handle out_object);
    void take_kept(std::size_t tensor, std::int64_t step, double deadline_s);
    void apply(std::int64_t step, std::int64_t number, const std::vector<Rates5>& groups, bool maximize,
               double clip_norm);
    void carry(std::int64_t step) { core().carry(step); }
    nb::tuple fetch(const std::vector<std::size_t>& tensors, std::int64_t step, double deadline_s);
    nb::tuple changes(std::size_t tensor, std::int64_t step, double deadline_s);
    std::vector<std::int64_t> versions() { return core().versions(); }
    nb::list take_outgoing(std::size_t limit);
    nb::object deliver(int kind, std::uint64_t origin, std::uint64_t step, std::uint64_t tensor, std::uint64_t count,
                       nb::handle payload_object);
    void fail(const std::string& reason) { core().fail(reason); }
    void quiesce(double deadline_s);
    void resume() { core().resume(); }
    nb::list recent_parts();
    void idle(double deadline_s);
    nb::list digests();
    std::vector<std::string> waiting_for(std::size_t limit) { return core().waiting_for(limit); }
    nb::tuple take_stats();

  private:
    static Live live_for(Pipeline& pipeline, std::size_t tensor, nb::handle object, std::optional<Loaded>& buffer);
    bool forked() const { return getpid() != process_; }
    Pipeline& core();
    double await(Pipeline& pipeline, const std::vector<std::size_t>& tensors, std::int64_t step, double deadline_s);

    const pid_t process_;
    std::vector<Loaded> kept_;
    std::unique_ptr<Graveyard> graveyard_;
    std::unique_ptr<Pipeline> core_;
};

}  // namespace atoll_kernels
