#pragma once

#include "exchange_engine.hpp"

// Exchanges updates: each rank's own optimizer moves its live weights, and the shared parameters take the ranks' sum.
namespace atoll_kernels {

class UpdateEngine final : public ExchangeEngine {
  public:
    // every: rounds between two exchanges of one tensor; in the others its values stay. replicas: as ExchangeEngine.
    UpdateEngine(Settings settings, std::int64_t every, bool replicas)
        : ExchangeEngine(std::move(settings), replicas), every_(every) {}
    ~UpdateEngine() override { close(); }

    std::size_t add_tensor(const TensorSettings& settings);
    const Live& live(std::size_t tensor) const { return at(tensor).weights.live(); }

    // gradient.data: this rank's own weights, after its own update; or chosen blocks of weight * (reference - live).
    void compress_live(std::int64_t sync_round, std::size_t tensor, Gradient gradient);
    void sum_updates(std::int64_t sync_round, float weight, std::span<const std::size_t> k_blocks,
                     std::span<const std::size_t> aggregator_blocks);
    void change_turns(std::int64_t sync_round, std::int64_t every, std::span<const std::int64_t> turns);
    std::size_t read_residual(std::size_t tensor, const Live& live, float* out);
    Part take_reference(std::size_t tensor);
    const std::vector<std::uint32_t>& drift_blocks(std::size_t tensor) const { return at(tensor).drift.blocks(); }
    void set_live(std::size_t tensor, const Live& live, const float* residual, float weight);
    std::size_t snapshot_residual(std::int64_t sync_round, std::size_t tensor, const Live& live, float* out,
                                  std::shared_ptr<const void> out_owner);

  private:
    Selected choose_part(Tensor& tensor, std::int64_t sync_round, const Gradient& live, Scratch& scratch,
                         DriftSquares& drift) override;
    EncodedPart encode_sum(Tensor& tensor, std::int64_t sync_round, const Units& sum, Scratch& scratch) override;
    void take_total(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>&, const Units& total,
                    RoundUpdate& round_update) override {
        advance(tensor, round_update, sync_round, &total);
    }
    void update(Tensor& tensor, const RoundUpdate& round_update, std::int64_t sync_round, const Units& total) override;
    void publish_live(Tensor& tensor) override;
    Part take_changed(Tensor& tensor) override;

    void check_aggregator(const TensorSettings& settings) const;
    void note_copy(std::int64_t sync_round, Tensor& tensor, const Gradient& live);

    const std::int64_t every_;
};

}  // namespace atoll_kernels
