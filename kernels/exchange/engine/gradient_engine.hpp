#pragma once

#include "exchange_engine.hpp"

// Exchanges gradients, which a sparse optimizer applies to the shared parameters (StellaTrain).
namespace atoll_kernels {

class GradientEngine final : public ExchangeEngine {
  public:
    GradientEngine(Settings settings, bool error_feedback)
        : ExchangeEngine(std::move(settings), false), error_feedback_(error_feedback) {}
    ~GradientEngine() override { close(); }

    bool feeds_back() const { return error_feedback_; }
    std::size_t add_tensor(TensorSettings settings);
    void compress(std::int64_t sync_round, std::size_t tensor, Gradient gradient);

    void apply(std::int64_t sync_round, OptimizerStep step);
    void accumulate(std::int64_t sync_round);
    void snapshot_residual(std::int64_t sync_round, std::size_t tensor, float* out,
                           std::shared_ptr<const void> out_owner);

  private:
    Selected choose_part(Tensor& tensor, std::int64_t sync_round, const Gradient& gradient, Scratch& scratch,
                         DriftSquares& drift) override;
    EncodedPart encode_sum(Tensor& tensor, std::int64_t sync_round, const Units& sum, Scratch& scratch) override;
    void take_total(Tensor& tensor, std::int64_t sync_round, const std::vector<SharedPart>& sums, const Units& total,
                    RoundUpdate& round_update) override;
    void update(Tensor& tensor, const RoundUpdate& round_update, std::int64_t sync_round, const Units& total) override;
    void publish_live(Tensor& tensor) override { tensor.weights.publish(); }
    Part take_changed(Tensor& tensor) override;

    void check_step(const OptimizerStep& step) const;
    void scale_is_known(std::int64_t sync_round, RoundUpdate& round_update);  // with mutex_ held

    const bool error_feedback_;
};

}  // namespace atoll_kernels
