"""The input of estimators: a step of one rank as it was measured, free of how it travelled here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """Seconds are differences of the worker's monotonic clock; see atoll.v1.StepSample for what each covers.

    Parts of compute_s (load, forward, backward, update) are all 0 where they were not measured, squared norms where
    they were not sampled, sync_s and last_sync_s with a strategy that never waits for others. halves: the squared norms
    are of the two halves of the rank's own batch. sampled_batches: how many as large as this one they are of. passes:
    in which local_batch was trained. peak_bytes, memory_bytes, max_batch: 0 in steps in which memory was not looked at.
    strategy_metrics: what the strategy reports, by name.
    """

    step: int
    plan: int
    local_batch: int
    total_batch: int
    step_s: float
    compute_s: float
    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    first_bucket_s: float = 0.0
    update_s: float = 0.0
    sync_s: float = 0.0
    last_sync_s: float = 0.0
    local_grad_sqnorm: float = 0.0
    global_grad_sqnorm: float = 0.0
    halves: bool = False
    sampled_batches: int = 1
    passes: int = 1
    peak_bytes: int = 0
    memory_bytes: int = 0
    max_batch: int = 0
    strategy_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def stall_s(self) -> float:
        """Waiting for what others send; 0 with a strategy that does not say."""
        return self.strategy_metrics.get("stall_s", 0.0)
