"""Turns the telemetry of one run into its profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from atoll.controller.estimators.bandwidth import BandwidthEstimator
from atoll.controller.estimators.noise import NoiseEstimator
from atoll.controller.estimators.observed import ObservedLink, ObservedStep
from atoll.controller.estimators.overlap import OverlapEstimator
from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.rank import RankEstimator

_STALL_EVERY_S: Final = 0.5
"""How often all ranks are asked how long they wait: a thousand of them report their links every second."""


class StepEstimator(Protocol):
    """Of one run, for one strategy: its estimate is `Profile.of_strategy`."""

    def observe(self, rank: int, step: ObservedStep) -> None:
        """One more step of a rank, its times finite and not negative."""
        ...

    def estimate(self) -> object: ...


class RunEstimators:
    """What is known of one run. Bounded by the number of ranks; takes whatever arrives, in any order of ranks, and
    leaves out what makes no sense. of_strategy: what its strategy wants to learn beside."""

    def __init__(self, of_strategy: StepEstimator | None = None) -> None:
        self._of_strategy = of_strategy
        self._ranks: dict[int, RankEstimator] = {}
        self._overlap = OverlapEstimator()
        self._noise = NoiseEstimator()
        self._bandwidth = BandwidthEstimator()
        self._entries = 0
        self._stall_share = 0.0
        self._stall_s: float | None = None  # when that was found

    def observe(self, rank: int, observed: ObservedStep) -> None:
        """One more step of a rank; its steps come in ascending order, some may be missing."""
        known = self._ranks.get(rank) or RankEstimator()
        measured = known.observe(observed)
        if known.last_step >= 0:
            self._ranks[rank] = known
        if not measured:
            return
        self._overlap.observe(rank, observed)
        if self._of_strategy is not None:
            self._of_strategy.observe(rank, observed)
        if observed.local_sqnorm > 0 and observed.global_sqnorm > 0:
            self._noise.observe(observed)

    def observe_links(
        self, rank: int, island_of: Mapping[int, str], links: Iterable[ObservedLink], now_s: float
    ) -> None:
        """What a rank's connections carried from the run's beginning until now_s, of any one monotonic clock.

        island_of: by rank. Links within an island count for nothing.
        """
        if self._stall_s is None or not 0 <= now_s - self._stall_s < _STALL_EVERY_S:
            self._stall_share = min((known.stall_share for known in self._ranks.values()), default=0.0)
            self._stall_s = now_s
        self._bandwidth.observe(rank, island_of, links, now_s, self._stall_share)

    def observe_entries(self, entries: int) -> None:
        """Trained parameters of the model, as a worker told."""
        self._entries = max(self._entries, entries)

    def profile(self) -> Profile:
        plan = max((known.plan for known in self._ranks.values()), default=0)
        newest = [known for known in self._ranks.values() if known.plan == plan]
        step_s, steps = max((known.whole_step() for known in newest), default=(0.0, 0))
        profiles = {rank: known.profile() for rank, known in sorted(self._ranks.items())}
        return Profile(
            plan=plan,
            total_batch=max((known.total_batch for known in newest), default=0),
            entries=self._entries,
            step_s=step_s,
            steps=steps,
            newest_step=max((known.last_step for known in self._ranks.values()), default=0),
            ranks={rank: profile for rank, profile in profiles.items() if profile is not None},
            overlap=self._overlap.estimate(),
            noise=self._noise.estimate(),
            links=self._bandwidth.estimates(),
            of_strategy=None if self._of_strategy is None else self._of_strategy.estimate(),
        )
