"""Estimate the profile of one run from its telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from atoll.controller.estimators.bandwidth import BandwidthEstimator, ObservedLink, PathEstimator
from atoll.controller.estimators.noise import NoiseEstimator
from atoll.controller.estimators.overlap import OverlapEstimator
from atoll.controller.estimators.profile import Profile
from atoll.step_estimators.estimates import RankEstimate
from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.rank import RankEstimator
from atoll.step_estimators.sums import NormSums, SyncSums, norms_of, sync_of
from atoll.strategies.declaration import Declared

_STALL_EVERY_S: Final = 0.5
"""Seconds between two looks at all ranks' waiting: a thousand of them report their links every second."""


class StepEstimator(Protocol):
    """Estimator of one run for one strategy: its estimate is `Profile.of_strategy`."""

    def observe(self, rank: int, step: ObservedStep) -> None:
        """Add a step of a rank, its times finite and not negative."""
        ...

    def estimate(self) -> object: ...


@runtime_checkable
class MessageEstimator(StepEstimator, Protocol):
    """A StepEstimator that also receives messages of its strategy's workers."""

    def on_message(self, rank: int, message: Declared) -> None:
        """Add a message. message: of the type that the strategy registered."""
        ...


class RunEstimators:
    """Estimators of one run. Bounded by the number of ranks. They take telemetry of ranks in any order, and leave out
    invalid values. of_strategy: the strategy's own estimator."""

    def __init__(self, of_strategy: StepEstimator | None = None) -> None:
        self._of_strategy = of_strategy
        self._ranks: dict[int, RankEstimate] = {}
        self._estimators: dict[int, RankEstimator] = {}  # of ranks whose agents send every step
        self._overlap = OverlapEstimator()
        self._noise = NoiseEstimator()
        self._bandwidth = BandwidthEstimator()
        self._paths = PathEstimator()
        self._entries = 0
        self._stall_share = 0.0
        self._stall_s: float | None = None  # when that was found

    def observe(self, rank: int, observed: ObservedStep) -> None:
        """Add a step of a rank; its steps come in ascending order, and some may be missing."""
        known = self._estimators.get(rank) or RankEstimator()
        measured = known.observe(observed)
        if known.last_step >= 0:
            self._estimators[rank] = known
        if not measured:
            return
        self.observe_sync(observed.step, sync_of(observed))
        if (norms := norms_of(observed)) is not None:
            self.observe_norms(observed.step, norms)
        if self._of_strategy is not None:
            self._of_strategy.observe(rank, observed)

    def on_message(self, rank: int, message: Declared) -> None:
        """Add a message of a worker to its strategy."""
        if isinstance(self._of_strategy, MessageEstimator):
            self._of_strategy.on_message(rank, message)

    def observe_rank(self, rank: int, estimate: RankEstimate) -> None:
        """Add an agent's estimate from all steps of its rank; older estimates change nothing."""
        if rank not in self._ranks or estimate.last_step >= self._ranks[rank].last_step:
            self._ranks[rank] = estimate

    def observe_sync(self, step: int, sums: SyncSums) -> None:
        """Add measurements of a step by some ranks; each rank once, times finite and not negative."""
        self._overlap.observe(step, sums)

    def observe_norms(self, step: int, sums: NormSums) -> None:
        """Add gradient samples of a step by some ranks; each rank once, numbers finite and not negative."""
        self._noise.observe(step, sums)

    def observe_links(
        self, rank: int, island_of: Mapping[int, str], links: Sequence[ObservedLink], now_s: float
    ) -> None:
        """Add the traffic of a rank's connections from the run's beginning until now_s, of any one monotonic clock.

        island_of: by rank. Links within an island do not count."""
        if self._stall_s is None or not 0 <= now_s - self._stall_s < _STALL_EVERY_S:
            self._stall_share = min((known.stall_share for known in self._known().values()), default=0.0)
            self._stall_s = now_s
        step_s = self._ranks[rank].step_s if rank in self._ranks else 0.0
        self._bandwidth.observe(rank, island_of, links, now_s, stall_share=self._stall_share, step_s=step_s)
        self._paths.observe(rank, island_of, links, now_s)

    def observe_entries(self, entries: int) -> None:
        """Add a worker's report of the model's trained parameters."""
        self._entries = max(self._entries, entries)

    def _known(self) -> dict[int, RankEstimate]:
        for rank, estimator in self._estimators.items():
            self._ranks[rank] = estimator.estimate()
        return self._ranks

    def profile(self) -> Profile:
        known = self._known()
        plan = max((rank.plan for rank in known.values()), default=0)
        newest = [rank for rank in known.values() if rank.plan == plan]
        step_s, steps = max(((rank.step_s, rank.whole_steps) for rank in newest), default=(0.0, 0))
        return Profile(
            plan=plan,
            total_batch=max((rank.total_batch for rank in newest), default=0),
            entries=self._entries,
            step_s=step_s,
            steps=steps,
            newest_step=max((rank.last_step for rank in known.values()), default=0),
            ranks={rank: profile for rank in sorted(known) if (profile := known[rank].profile) is not None},
            overlap=self._overlap.estimate(rank for rank in known.values() if rank.measured),
            noise=self._noise.estimate(),
            sampled_steps=self._noise.steps,
            links=self._bandwidth.estimates(),
            paths=self._paths.estimates(),
            of_strategy=None if self._of_strategy is None else self._of_strategy.estimate(),
        )
