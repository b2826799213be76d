"""The word of planner `one-island` on a strategy on each link, beside who was sooner in the race."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from atoll.controller.planners.islands.one_island import Exchange, IslandTimes, OneIslandInput, OneIslandPlan
from atoll.controller.planners.registry import ONE_ISLAND
from atoll.strategies import registry
from racing.clock import Network
from racing.course import Lap

ALONE: Final = "solo-all"
STRATEGIES: Final[Mapping[str, str]] = {"ddp": "dense", "local-steps": "local-steps", "stale-sparse": "stale-sparse"}
"""By method of the race."""


def advised(
    laps: Mapping[str, Sequence[Lap]], target: float, links: Mapping[float, Network], step_s: float
) -> list[str]:
    """A line for each strategy and link; none where one island with all the data did not race."""
    said = []
    for method, strategy in STRATEGIES.items():
        for rho, network in links.items() if method in laps and ALONE in laps else ():
            planned = asked(laps[method][0], strategy, network, step_s)
            times = [_median_s(laps[name], target, network, step_s) for name in (ALONE, method)]
            says = f"one island {'IS' if planned.sooner else 'is not'} sooner"
            figures = f"{planned.alone_s * 1e3:.3g} ms alone, {planned.together_s * 1e3:.3g} ms together"
            raced = ", ".join("not reached" if one is None else f"{one:.1f} s" for one in times)
            said.append(f"{strategy} at rho {rho:g}: {says} ({figures}); in the race {raced}")
    return said


def asked(lap: Lap, strategy: str, network: Network, step_s: float) -> OneIslandPlan:
    """The planner's word before a step was made: from an island's step, what the exchange sends, and the link."""
    first = lap.exchanges[0]
    sent = max(lap.up_bytes, sum(one.down_bytes for one in lap.exchanges)) / lap.steps
    return ONE_ISLAND.plan(
        OneIslandInput(
            islands=tuple(
                IslandTimes(name=str(i), batch=rows, compute_s=step_s / speed)
                for i, (speed, rows) in enumerate(zip(lap.speeds, lap.rows or (1,) * len(lap.speeds), strict=True))
            ),
            exchange=Exchange(
                bytes=sent,
                bandwidth=min(network.up_bps, network.down_bps) / 8,
                hidden=1 if first.due > first.after + 1 else first.overlap,
            ),
            steps=max(1.0, registry.find(strategy).steps_range[0]),
        )
    )


def _median_s(laps: Sequence[Lap], target: float, network: Network, step_s: float) -> float | None:
    found = [lap.seconds_to(target, network, step_s) for lap in laps]
    reached = [one for one in found if one is not None]
    return statistics.median(reached) if len(reached) == len(found) else None
