"""Controller half: plan which tensors are compressed, where, how they are sent and what is fused. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

from atoll.controller.deciding.given import MIN_GAIN, Given, plan_after
from atoll.controller.deciding.words import changed, mbit
from atoll.controller.planners.registry import TENSOR_GROUPS, Decision
from atoll.controller.planners.tensor_compression.compression import CompressionInput
from atoll.controller.planners.tensor_compression.tensor_groups import GroupedRun, GroupingPlan, grouping_time
from atoll.controller.state.records import PlanRecord
from atoll.step_estimators.estimates import RankProfile
from atoll.strategies.compressed.costs.compression_costs import CompressionCosts, CostEstimator, costs_of, link_bps
from atoll.strategies.compressed.groups.options import ALLREDUCE, TensorGroup, Way, named
from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.compressed.settings import WORDS, Compressed

MIN_CHANGE: Final = 0.05
"""Relative change of the present groups' predicted time from which they are planned again."""
MAX_SHOWN_RUNS: Final = 3


class CompressedController:
    """Controller half of one job. See atoll.controller.deciding.given."""

    def __init__(self, settings: Compressed) -> None:
        self._settings = settings

    def estimator(self) -> CostEstimator:
        return CostEstimator()

    def next_plan(self, given: Given, ranks: Sequence[RankProfile]) -> PlanRecord | None:
        told = given.profile.of_strategy
        if len(ranks) < 2 or not isinstance(told, Mapping):
            return None
        costs = costs_of(told, len(ranks))
        if costs is None:
            return None
        present_s = _present_s(given.current, costs)
        if present_s is not None and not _moved(given.current, present_s):
            return None
        decision = TENSOR_GROUPS.decide(costs.given)
        planned = decision.plan
        is_ours = given.current.planner == TENSOR_GROUPS.name
        if present_s is not None and not is_ours and not planned.iteration_time < present_s * (1 - MIN_GAIN):
            return None  # a plan of another kind came between: what it kept is good enough
        # What is not sooner stays, and is planned from now: the record says what it takes today.
        stays = present_s is not None and not planned.iteration_time < present_s * (1 - MIN_CHANGE / 2)
        params = given.current.strategy_params if stays else _params(planned, costs)
        return plan_after(
            given,
            decision,
            strategy_params=params,
            reason=_reason(given, decision, costs, present_s, stays=stays),
            measured_s=costs.iteration_s or given.profile.step_s,
            predicted_s=present_s if stays and present_s is not None else planned.iteration_time,
        )


def _params(planned: GroupingPlan, costs: CompressionCosts) -> dict[str, object]:
    ends = list(accumulate(costs.counts, initial=0))  # of the rows, in tensors
    bounds = list(accumulate(planned.sizes, initial=0))
    groups = [
        TensorGroup(ends[begin], ends[end], named(option))
        for (begin, end), option in zip(pairwise(bounds), planned.options, strict=True)
    ]
    return dict(CompressedPlan.of(groups).said())


def _present_s(current: PlanRecord, costs: CompressionCosts) -> float | None:
    """Return the seconds of an iteration with the present groups at today's costs; None if no plan made them."""
    groups = CompressedPlan.model_validate(dict(current.strategy_params)).as_groups()
    if groups is None or groups[-1].end != sum(costs.counts):
        return None
    rows = {end: row for row, end in enumerate(accumulate(costs.counts), start=1)}
    if any(group.end not in rows for group in groups):
        return None
    ends = [rows[group.end] for group in groups]
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    known = {option.name for option in costs.given.options}
    names = [group.way.name for group in groups]
    return grouping_time(costs.given, sizes, names) if known.issuperset(names) else None


def _moved(current: PlanRecord, present_s: float) -> bool:
    """Return whether this time differs from the planned one."""
    if current.planner != TENSOR_GROUPS.name:
        return True
    return abs(present_s - current.predicted_s) > MIN_CHANGE * current.predicted_s


def _reason(
    given: Given,
    decision: Decision[CompressionInput, GroupingPlan],
    costs: CompressionCosts,
    present_s: float | None,
    *,
    stays: bool,
) -> str:
    """Return for example 'link 480 → 95 Mbit/s: tensors 31-40: DGC on CPU, divisible, fused: 12 ms sooner; 9 groups;
    step 0.31 → 0.12 s predicted'."""
    planned, link = decision.plan, f"link {mbit(link_bps(costs.given))} Mbit/s: "
    if given.current.planner == TENSOR_GROUPS.name:
        before = link_bps(TENSOR_GROUPS.read(given.current.input))
        link = changed("link", mbit(before), mbit(link_bps(costs.given)), " Mbit/s: ")
    if stays and present_s is not None:
        return f"{link}groups stay, step {given.current.predicted_s:.3g} → {present_s:.3g} s predicted"
    runs = sorted(planned.runs, key=lambda run: -run.sooner)
    compressed = [run for run in runs if run.option != ALLREDUCE]
    said = [_run_words(run, costs) for run in sorted(compressed[:MAX_SHOWN_RUNS], key=lambda run: run.begin)]
    if len(compressed) > MAX_SHOWN_RUNS:
        said.append(f"{len(compressed) - MAX_SHOWN_RUNS} more such runs")
    if not compressed:
        said.append("nothing is compressed")
    then_s = present_s if present_s is not None else costs.iteration_s
    steps = changed("step", f"{then_s:.3g}", f"{planned.iteration_time:.3g}", " s")
    return f"{link}{'; '.join(said)}; {len(planned.sizes)} groups; {steps} predicted"


def _run_words(run: GroupedRun, costs: CompressionCosts) -> str:
    """Return for example 'tensors 31-40: DGC on CPU, divisible, fused: 12 ms sooner'; tensors count from 1, in the
    order of the backward pass."""
    ends = list(accumulate(costs.counts, initial=0))
    first, last = ends[run.begin] + 1, ends[run.end]
    which = f"tensors {first}-{last}" if last > first else f"tensor {first}"
    fused = ", fused" if run.groups < last - first + 1 else ""
    way: Way = named(run.option)
    return f"{which}: {WORDS[costs.algorithm]} {way.words}{fused}: {_shown(1e3 * run.sooner)} ms sooner"


def _shown(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"
