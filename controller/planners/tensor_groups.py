"""Chooses which tensors are synchronised as one, and how: planners `compression` and `fusion` in turns.

Source: Espresso and Cupcake (Wang, 2023), chapters 4 and 5. Both look at one timeline (atoll.kernels.timeline): what
fusion finds for a run of tensors with the same option counts only if the timeline of all ends sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Final

from atoll.controller.planners.compression import (
    DEVICE_NAME,
    LINK,
    CompressionInput,
    Option,
    TensorTimes,
    free_of_computing,
    timeline,
)
from atoll.kernels.timeline import fuse

TASKS_SEARCHED: Final = 250_000
"""Simulated at most, by each search for options."""
TURNS: Final = 6
STARTS: Final = 3
THRESHOLDS: Final = 4
LOOKED_AT: Final = 12_000
"""Tensors in all the groupings, at most, that each refinement looks at."""
EVERY_TENSORS: Final = 7
"""Up to so many, all groupings are tried."""
LEAST_GAIN: Final = 1e-6
PLAIN: Final = "none"


@dataclass(frozen=True, slots=True)
class GroupedRun:
    """Neighbouring tensors [begin, end) of one option, in so many groups: by so many seconds the iteration ends sooner
    than with option `none` for them."""

    begin: int
    end: int
    option: str
    groups: int
    sooner: float


@dataclass(frozen=True, slots=True)
class GroupingPlan:
    """sizes: tensors of each group; options: of each, by name. iteration_time: seconds; bound: the same where only
    links take time. uniform: with one option for all tensors, each fused as is best for it."""

    sizes: tuple[int, ...]
    options: tuple[str, ...]
    iteration_time: float
    bound: float
    uniform: dict[str, float]
    runs: tuple[GroupedRun, ...]


@dataclass(frozen=True, slots=True)
class _Grouping:
    """ends: of each group, the tensor after its last; choice: its option; end_s: of the timeline."""

    ends: tuple[int, ...]
    choice: tuple[int, ...]
    end_s: float


class _GroupingSearch:
    """Groupings of one input."""

    def __init__(self, given: CompressionInput) -> None:
        self.tensors, self.options = given.tensors, given.options
        self._bytes = list(accumulate((one.bytes for one in given.tensors), initial=0))

    def of(self, ends: Sequence[int], choice: Sequence[int]) -> _Grouping:
        end_s = timeline(self.fused(ends), self.options).end_s(choice)
        return _Grouping(tuple(ends), tuple(choice), end_s)

    def fused(self, ends: Sequence[int]) -> list[TensorTimes]:
        return [
            TensorTimes.model_construct(
                bytes=self._bytes[end] - self._bytes[begin],
                backward_s=sum(one.backward_s for one in self.tensors[begin:end]),
            )
            for begin, end in zip((0, *ends), ends, strict=False)
        ]

    def refused(self, choice_N: Sequence[int]) -> _Grouping:
        """With this option for each tensor, runs of one option fused by themselves."""
        ends: list[int] = []
        choice: list[int] = []
        for option, run in groupby(range(len(choice_N)), key=lambda index: choice_N[index]):
            tensors = list(run)
            first = tensors[0]
            found = self._fuse(self.options[option], first, tensors[-1] + 1)
            ends += [first + end for end in found]
            choice += [option] * len(found)
        return self.of(ends, choice)

    def chosen(self, grouping: _Grouping) -> _Grouping:
        """The same groups with the options that are found for them."""
        choice, end_s = timeline(self.fused(grouping.ends), self.options).search(TASKS_SEARCHED)
        return _Grouping(grouping.ends, tuple(choice), end_s)

    def refined(self, grouping: _Grouping) -> _Grouping:
        """Neighbours as one, groups cut in two, a group's end moved by one tensor, where everything ends sooner so."""
        looked_at = 0
        index = 0
        while index < len(grouping.ends) and looked_at < LOOKED_AT:
            better = None
            for ends, choice in _near(grouping, index):
                looked_at += len(self.tensors)
                other = self.of(ends, choice)
                if other.end_s < grouping.end_s - LEAST_GAIN and (better is None or other.end_s < better.end_s):
                    better = other
            grouping, index = (better, max(index - 1, 0)) if better is not None else (grouping, index + 1)
        return grouping

    def every(self) -> _Grouping:
        """The best of all groupings, each with the options that are found for it."""
        count = len(self.tensors)
        found = []
        for cuts in range(1 << (count - 1)):
            ends = [end for end in range(1, count) if cuts >> (end - 1) & 1] + [count]
            choice, end_s = timeline(self.fused(ends), self.options).search(TASKS_SEARCHED >> (count - 1))
            found.append(_Grouping(tuple(ends), tuple(choice), end_s))
        return min(found, key=lambda grouping: grouping.end_s)

    def _fuse(self, option: Option, begin: int, end: int) -> list[int]:
        """Ends of the groups of tensors [begin, end), counted from begin: what the option does on the device before its
        first task on a link is compression, what it does on links is communication."""
        on_links = [place for place, task in enumerate(option.tasks) if task.on.startswith(LINK)]
        before = option.tasks[: on_links[0]] if on_links else option.tasks
        compress = [task for task in before if task.on == DEVICE_NAME]
        links = [option.tasks[place] for place in on_links]
        ends, _ = fuse(
            [(float(one.bytes), one.backward_s) for one in self.tensors[begin:end]],
            (sum(task.alpha for task in compress), sum(task.beta * task.factor for task in compress), 0.0),
            (sum(task.alpha for task in links), sum(task.beta * task.factor for task in links)),
        )
        return ends


def plan_grouping(given: CompressionInput) -> GroupingPlan:
    """Groups and their options with a short iteration: never longer than with one option for all tensors, fused as is
    best for it, nor than with that for the largest alone. Deterministic."""
    search = _GroupingSearch(given)
    count = len(given.tensors)
    uniform = [search.refused([option] * count) for option in range(len(given.options))]
    plain = next((index for index, option in enumerate(given.options) if option.name == PLAIN), 0)
    by_size = [
        search.refused([option if tensor.bytes >= least else plain for tensor in given.tensors])
        for option in sorted(range(len(uniform)), key=lambda option: uniform[option].end_s)[:2]
        if option != plain
        for least in _thresholds(given.tensors)
    ]
    starts = sorted([*uniform, *by_size], key=lambda grouping: grouping.end_s)[:STARTS]
    found = [_in_turns(search, start) for start in starts]
    if count <= EVERY_TENSORS:
        found.append(search.every())
    best = min(found, key=lambda grouping: grouping.end_s)
    groups = search.fused(best.ends)
    free = timeline(groups, tuple(free_of_computing(option) for option in given.options))
    bound_s = min(free.search(TASKS_SEARCHED)[1], free.end_s(best.choice), best.end_s)
    return GroupingPlan(
        sizes=tuple(end - begin for begin, end in zip((0, *best.ends), best.ends, strict=False)),
        options=tuple(given.options[option].name for option in best.choice),
        iteration_time=given.forward_s + best.end_s,
        bound=given.forward_s + bound_s,
        uniform={
            option.name: given.forward_s + found.end_s for option, found in zip(given.options, uniform, strict=True)
        },
        runs=_runs(search, given, best, plain),
    )


def grouping_time(given: CompressionInput, sizes: Sequence[int], options: Sequence[str]) -> float:
    """Seconds of an iteration with these groups. Raises BadInput where they are not of these tensors."""
    names = [option.name for option in given.options]
    search, ends, end = _GroupingSearch(given), [], 0
    for size in sizes:
        end += size
        ends.append(end)
    return given.forward_s + search.of(ends, [names.index(option) for option in options]).end_s


def _near(grouping: _Grouping, index: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ends and choice of groupings that differ at group `index`."""
    ends, choice = grouping.ends, grouping.choice
    begin = ends[index - 1] if index else 0
    if index + 1 < len(ends):
        for option in {choice[index], choice[index + 1]}:
            yield ends[:index] + ends[index + 1 :], (*choice[:index], option, *choice[index + 2 :])
        if ends[index] + 1 < ends[index + 1]:
            yield (*ends[:index], ends[index] + 1, *ends[index + 1 :]), choice
        if ends[index] - 1 > begin:
            yield (*ends[:index], ends[index] - 1, *ends[index + 1 :]), choice
    if ends[index] - begin > 1:
        for cut in {begin + 1, (begin + ends[index]) // 2, ends[index] - 1}:
            yield (*ends[:index], cut, *ends[index:]), (*choice[: index + 1], *choice[index:])


def _in_turns(search: _GroupingSearch, grouping: _Grouping) -> _Grouping:
    """Options for the groups, then groups for the options, until neither makes it shorter."""
    for _ in range(TURNS):
        chosen = min(grouping, search.chosen(grouping), key=lambda one: one.end_s)
        choice_N = [
            option
            for option, begin, end in zip(chosen.choice, (0, *chosen.ends), chosen.ends, strict=False)
            for _ in range(begin, end)
        ]
        after = search.refined(min(chosen, search.refused(choice_N), key=lambda one: one.end_s))
        if not after.end_s < grouping.end_s - LEAST_GAIN:
            return min(grouping, after, key=lambda one: one.end_s)
        grouping = after
    return grouping


def _thresholds(tensors: Sequence[TensorTimes]) -> list[int]:
    """Sizes that cut the tensors into parts of about equal numbers, ascending."""
    sizes = sorted({tensor.bytes for tensor in tensors})
    return sorted({sizes[len(sizes) * part // (THRESHOLDS + 1)] for part in range(1, THRESHOLDS + 1)})


def _runs(search: _GroupingSearch, given: CompressionInput, best: _Grouping, plain: int) -> tuple[GroupedRun, ...]:
    runs: list[GroupedRun] = []
    begin = 0
    for end, option in zip(best.ends, best.choice, strict=True):
        name = given.options[option].name
        if runs and runs[-1].option == name:
            runs[-1] = replace(runs[-1], end=end, groups=runs[-1].groups + 1)
        else:
            runs.append(GroupedRun(begin, end, name, 1, 0.0))
        begin = end
    found = []
    for run in runs:
        choice = [
            plain if run.begin < end <= run.end else option for end, option in zip(best.ends, best.choice, strict=True)
        ]
        found.append(replace(run, sooner=max(search.of(best.ends, choice).end_s - best.end_s, 0.0)))
    return tuple(found)
