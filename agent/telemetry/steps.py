"""Makes an estimate of each of this node's ranks from its steps, and adds up what they measured of a step together. The
controller needs no more, but for strategies that ask for each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.jobs.worker_key import WorkerKey
from atoll.step_estimators.rank import RankEstimator
from atoll.step_estimators.sums import NormSums, SyncSums, add_ranks, norms_of, sync_of
from atoll.step_estimators.wire import estimate_to_wire, step_from_wire, sums_to_wire
from atoll.telemetry.telemetry_limits import MAX_STEPS
from atoll.v1.agents_pb2 import RankEstimate, StepSums
from atoll.v1.common_pb2 import StepSample


@dataclass(slots=True)
class _RunSums:
    """Unsent sums by step, at most MAX_STEPS: the first ones are worth the least."""

    syncs: dict[int, SyncSums] = field(default_factory=dict)
    norms: dict[int, NormSums] = field(default_factory=dict)


class StepEstimates:
    """Step estimates of registered workers. Their steps are valid messages (`flaw_of_step`)."""

    def __init__(self) -> None:
        self._ranks: dict[WorkerKey, RankEstimator] = {}
        self._sums: dict[tuple[str, int, int], _RunSums] = {}

    def __contains__(self, key: WorkerKey) -> bool:
        return key in self._ranks

    def begin(self, key: WorkerKey) -> None:
        self._ranks[key] = RankEstimator()

    def forget(self, key: WorkerKey) -> None:
        """Stop estimating a worker; the sums of its last steps are still sent."""
        self._ranks.pop(key, None)

    def observe(self, key: WorkerKey, view: int, sample: StepSample) -> None:
        """view: of its run, that the step was trained in."""
        observed = step_from_wire(sample)
        if not self._ranks[key].observe(observed):
            return
        sums = self._sums.setdefault((key.job, key.run, view), _RunSums())
        add_ranks(sums.syncs, observed.step, sync_of(observed), MAX_STEPS)
        if (norms := norms_of(observed)) is not None:
            add_ranks(sums.norms, observed.step, norms, MAX_STEPS)

    def estimate(self, key: WorkerKey) -> RankEstimate | None:
        """None before the worker's first step, and of one that it was not told of."""
        if (estimator := self._ranks.get(key)) is None or estimator.last_step < 0:
            return None
        return estimate_to_wire(estimator.estimate())

    def take_sums(self) -> Iterator[StepSums]:
        """Everything since the last call."""
        for (job, run, view), sums in self._sums.items():
            yield sums_to_wire(job, run, view, sums.syncs, sums.norms)
        self._sums.clear()
