"""Choose the strategy with the least predicted time to a given loss.

    time = step_s * steps

step_s is a step's seconds (step_times.py, or as measured), and steps those that teach what one step of whole gradients
does: the candidate's, as the race measured them, times what a thin or late exchange adds. Of candidates within TIE of
the best the first counts as best: whole gradients teach for certain.

A running strategy is left for a clear gain only. The gain must exceed MIN_GAIN, twice the uncertainty, and half of how
far the measured steps of both lie from their middle. One island with all the data is compared as well; that is advice,
for where data may be is not known here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from atoll.controller.planners.islands.one_island import IslandTimes, OneIslandInput, compare_one_island
from atoll.controller.planners.strategy_choice.facts import StrategyCandidate, StrategyInput
from atoll.controller.planners.strategy_choice.links import IslandPaths, island_paths
from atoll.controller.planners.strategy_choice.step_times import predict_step, refusal

TIE: Final = 0.08
"""Share of the best time within which candidates count as equal: a factor of steps is not known better."""
MIN_GAIN: Final = 0.1
"""Share of its time that leaving a running strategy must save."""
BESIDE_STEPS: Final = frozenset(("updates", "differences"))
"""Kinds of exchange that no step waits for."""
SHOWN_RUNNERS_UP: Final = 3
MIN_SHOWN_STEPS: Final = 1.05
"""Factor of steps below which a reason does not name it."""


@dataclass(frozen=True, slots=True)
class PredictedStrategy:
    """A candidate. step_s: seconds of a step, as measured if it was. steps: of it for one of whole gradients, within
    least_steps and most_steps. time_s: step_s * steps. bytes: of the busiest link in a step, one way. refused: why it
    was not compared; then the numbers are None."""

    name: str
    step_s: float | None
    steps: float | None
    least_steps: float | None
    most_steps: float | None
    time_s: float | None
    bytes: float | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class OneIslandAlone:
    """The island that would be soonest with all the data. time_s: of a step of the whole batch."""

    island: str
    time_s: float


@dataclass(frozen=True, slots=True)
class StrategyPlan:
    """strategy: the chosen one. candidates: all, in the order of the input. alone: None with one island."""

    strategy: str
    reason: str
    candidates: tuple[PredictedStrategy, ...]
    alone: OneIslandAlone | None


def plan_strategy(given: StrategyInput) -> StrategyPlan:
    """Choose a strategy. If nothing is known of the links the running one stays, or the first that is not refused."""
    paths = island_paths(given)
    predicted = tuple(_predicted(given, paths, one) for one in given.candidates)
    compared = [one for one in predicted if one.time_s is not None]
    alone = _alone(given)
    if not compared:
        return StrategyPlan(*_unknown(given), predicted, alone)
    least_s = min(_time(one) for one in compared)
    best = next(one for one in compared if _time(one) <= least_s * (1 + TIE))
    running = next((one for one in compared if one.name == given.running), None)
    stays = running is not None and best is not running and not _clearly_sooner(given, best, running)
    chosen = running if stays and running is not None else best
    return StrategyPlan(chosen.name, _reason(chosen, compared, alone, best if stays else None), predicted, alone)


def _time(one: PredictedStrategy) -> float:
    assert one.time_s is not None
    return one.time_s


def _predicted(given: StrategyInput, paths: IslandPaths | None, candidate: StrategyCandidate) -> PredictedStrategy:
    refused = refusal(given, candidate)
    if not refused and paths is None:
        refused = "no link between the islands was measured"
    if refused or paths is None:
        return PredictedStrategy(candidate.name, None, None, None, None, None, None, refused)
    step = predict_step(given, paths, candidate)
    measured_s = _measured_s(given, candidate.name)
    step_s = step.step_s + _excess_s(given, paths, candidate) if measured_s is None else measured_s
    steps = candidate.steps * step.steps
    return PredictedStrategy(
        name=candidate.name,
        step_s=step_s,
        steps=steps,
        least_steps=(candidate.least_steps or candidate.steps) * step.steps,
        most_steps=(candidate.most_steps or candidate.steps) * step.steps,
        time_s=step_s * steps,
        bytes=step.bytes,
    )


def _measured_s(given: StrategyInput, name: str) -> float | None:
    return next((one.step_s for one in given.measured if one.strategy == name), None)


def _excess_s(given: StrategyInput, paths: IslandPaths, candidate: StrategyCandidate) -> float:
    """Return the seconds by which the running strategy's measured step exceeds its prediction, since others would have
    them too. An exchange beside the steps may slow them down by itself, so this counts for others of its kind only."""
    running = next((one for one in given.candidates if one.name == given.running), None)
    measured_s = _measured_s(given, given.running)
    if running is None or measured_s is None:
        return 0.0
    if running.exchange in BESIDE_STEPS and candidate.exchange not in BESIDE_STEPS:
        return 0.0
    return max(0.0, measured_s - predict_step(given, paths, running).step_s)


def _clearly_sooner(given: StrategyInput, best: PredictedStrategy, running: PredictedStrategy) -> bool:
    margin = max(MIN_GAIN, 2 * given.uncertainty, (_spread(best) + _spread(running)) / 2)
    return _time(best) * (1 + margin) < _time(running)


def _spread(one: PredictedStrategy) -> float:
    """Return the largest relative distance of the measured steps from their middle."""
    assert one.steps is not None
    assert one.least_steps is not None
    assert one.most_steps is not None
    return max(one.most_steps / one.steps, one.steps / one.least_steps) - 1


def _alone(given: StrategyInput) -> OneIslandAlone | None:
    """Return the soonest island, if its devices share its work by their speeds."""
    if len(given.islands) < 2:
        return None
    islands = []
    for island in given.islands:
        batch = sum(rank.batch for rank in island.ranks)
        compute_s = batch / math.fsum(rank.batch / rank.compute_s for rank in island.ranks)
        islands.append(IslandTimes.of_measured(name=island.name, batch=batch, compute_s=compute_s))
    found = compare_one_island(OneIslandInput(islands=tuple(islands), step_s=1.0))
    return OneIslandAlone(found.island, found.alone_s)


def _unknown(given: StrategyInput) -> tuple[str, str]:
    allowed = [one for one in given.candidates if not refusal(given, one)] or [given.candidates[0]]
    chosen = next((one for one in allowed if one.name == given.running), allowed[0])
    return chosen.name, f"{chosen.name}: no link between the islands was measured"


def _reason(
    chosen: PredictedStrategy,
    compared: list[PredictedStrategy],
    alone: OneIslandAlone | None,
    better: PredictedStrategy | None,
) -> str:
    """Return 'local-steps: 0.51 s a step, 0.9 to 1.3× the steps; dense 8.8 s; one island alone 1.3× slower'.

    better: a strategy whose gain is not clear."""
    said = [f"{chosen.name}: {_seconds(chosen)} a step{_steps(chosen)}"]
    others = sorted((one for one in compared if one is not chosen), key=_time)
    for one in others[:SHOWN_RUNNERS_UP]:
        unclear = ", no clear gain" if one is better else ""
        said.append(f"{one.name} {_seconds(one)}{_steps(one)}{unclear}")
    if alone is not None:
        ratio = alone.time_s / _time(chosen)
        word = f"{ratio:.2g}× slower" if ratio >= 1 else f"{1 / ratio:.2g}× sooner"
        said.append(f"one island alone {word}")
    return "; ".join(said)


def _seconds(one: PredictedStrategy) -> str:
    return f"{one.step_s:.2g} s"


def _steps(one: PredictedStrategy) -> str:
    assert one.least_steps is not None
    assert one.most_steps is not None
    if one.most_steps < MIN_SHOWN_STEPS:
        return ""
    return f", {one.least_steps:.2g} to {one.most_steps:.2g}× the steps"
