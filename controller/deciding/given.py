"""The input of a decision: what is known of a run, and what may be decided about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.controller.deciding.controller_half import ControllerHalf
from atoll.controller.estimators.profile import Profile
from atoll.controller.planners.surrogate import Surrogate
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import RankProfile

GAIN: Final = 0.05
"""A new plan must promise to shorten the step by this part at least, and by two standard errors of what was measured,
or noise would move batches."""
MIN_INTERVAL_S: Final = 2.0
MOST_LEAD_STEPS: Final = 5
DELIVERED_S: Final = 1.0
"""A plan is with all workers by then; from what step it holds they agree in any case."""
REACH: Final = 2.0
"""A plan changes the total batch by this factor at most: predictions far from what was measured are not trusted."""


def lead_steps(step_s: float) -> int:
    """A plan holds from so many steps after the newest that was seen; 5 where no step has a time yet. Long steps have
    no need of more than two, and each is one more under what no longer fits."""
    return min(2 + int(DELIVERED_S / step_s), MOST_LEAD_STEPS) if step_s > 0 else MOST_LEAD_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What a user has taken out of the controller's hands. total_batch: 0 where it is not pinned; shares: empty."""

    strategy_params: Mapping[str, Any] = field(default_factory=dict)
    total_batch: int = 0
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be decided about a job. half: of its strategy; None where it has none. adapts: names of plan parameters
    of the strategy that may change. min_batch, max_batch: of the total batch, both 0 where it is fixed. rule: of the
    learning rate, "adascale", "square-root" or "none". initial_batch: the script's own total batch, 0 where it is not
    known yet. batches_per_update: that each update adds up. surrogate: of the offline profile; None: there is none."""

    split: str = "auto"
    half: ControllerHalf | None = None
    adapts: Collection[str] = ()
    min_batch: int = 0
    max_batch: int = 0
    rule: str = "adascale"
    initial_batch: int = 0
    batches_per_update: int = 1
    surrogate: Surrogate | None = None
    pins: Pins = field(default_factory=Pins)

    @property
    def adapts_batch(self) -> bool:
        return bool(self.max_batch) and not self.pins.total_batch and not self.fixed_split

    def may_change(self, parameter: str) -> bool:
        """Of a plan parameter of the strategy."""
        return parameter in self.adapts and parameter not in self.pins.strategy_params

    @property
    def fixed_split(self) -> bool:
        return self.split == "even" or bool(self.pins.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One run as it is. now_s, planned_s: monotonic; planned_s is when `current` was issued. islands: by rank, empty
    where there is one."""

    now_s: float
    planned_s: float
    current: PlanRecord
    profile: Profile
    policy: Policy
    islands: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.current.shares)

    def ranks(self) -> list[RankProfile] | None:
        """All ranks as measured under the present plan; None while one of them is not."""
        found: Mapping[int, RankProfile] = self.profile.ranks
        ranks = [found[rank] for rank in range(self.world_size) if rank in found]
        if len(ranks) < self.world_size or any(rank.plan != self.current.id for rank in ranks):
            return None
        return ranks
