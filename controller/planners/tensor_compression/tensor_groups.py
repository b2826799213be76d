"""Choose which neighbouring tensors are synchronised as one group, and an option for each group.

Alternate between planners `fusion` (groups for given options) and `compression` (options for given groups), then move
the borders of groups. A change counts only if it shortens the timeline of all tensors (atoll.kernels.timeline).
Source: Espresso and Cupcake (Wang, 2023), chapters 4 and 5; the alternation is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import Final

from atoll.controller.planners.tensor_compression.compression import (
    DEVICE_NAME,
    LINK,
    CompressionInput,
    Option,
    TaskCost,
    TensorTimes,
    timeline,
)
from atoll.kernels.timeline import fuse

TASKS_SEARCHED: Final = 250_000
"""Simulated tasks of one search for options."""
MAX_ALTERNATIONS: Final = 6
"""Rounds of compression and fusion from one start."""
STARTS: Final = 3
"""Groupings from which the rounds start: the shortest of those with one option, or one from a size on."""
SIZE_THRESHOLDS: Final = 4
"""Sizes from which on tensors are compressed in a start."""
TENSORS_REFINED: Final = 12_000
"""Tensors in all the groupings that one refinement simulates."""
TRY_ALL_TENSORS: Final = 7
"""Number of tensors up to which every grouping is tried."""
MIN_GAIN_S: Final = 1e-6
"""Seconds by which a change must shorten the iteration to be kept."""
PLAIN: Final = "none"
"""Name of the option without compression."""


@dataclass(frozen=True, slots=True)
class GroupedRun:
    """Neighbouring tensors [begin, end) with one option, in `groups` groups. sooner: seconds that the option saves
    against option `none` for these tensors."""

    begin: int
    end: int
    option: str
    groups: int
    sooner: float


@dataclass(frozen=True, slots=True)
class GroupingPlan:
    """sizes: number of tensors in each group. options: name of each group's option. iteration_time: seconds. uniform:
    the iteration time with one option for all tensors, by name."""

    sizes: tuple[int, ...]
    options: tuple[str, ...]
    iteration_time: float
    uniform: dict[str, float]
    runs: tuple[GroupedRun, ...]


@dataclass(frozen=True, slots=True)
class _Grouping:
    """ends: the tensor after each group's last. choice: each group's option. end_s: the end of the timeline."""

    ends: tuple[int, ...]
    choice: tuple[int, ...]
    end_s: float


_end_s = attrgetter("end_s")


class _GroupingSearch:
    """Make, simulate and improve groupings of one input's tensors."""

    def __init__(self, given: CompressionInput) -> None:
        self.tensors, self.options = given.tensors, given.options
        self._first_byte = list(accumulate((one.bytes for one in given.tensors), initial=0))

    def simulated(self, ends: Sequence[int], choice: Sequence[int]) -> _Grouping:
        return _Grouping(tuple(ends), tuple(choice), timeline(self.groups(ends), self.options).end_s(choice))

    def groups(self, ends: Sequence[int]) -> list[TensorTimes]:
        """Return each group as one tensor."""
        return [
            TensorTimes.model_construct(
                bytes=self._first_byte[end] - self._first_byte[begin],
                backward_s=sum(one.backward_s for one in self.tensors[begin:end]),
            )
            for begin, end in pairwise((0, *ends))
        ]

    def fused(self, option_N: Sequence[int]) -> _Grouping:
        """Return the grouping of tensors with these options in which each run of one option is fused by itself."""
        ends: list[int] = []
        choice: list[int] = []
        begin = 0
        for option, run in groupby(option_N):
            end = begin + len(list(run))
            found = _fused_ends(self.options[option], self.tensors[begin:end])
            ends += [begin + one for one in found]
            choice += [option] * len(found)
            begin = end
        return self.simulated(ends, choice)

    def searched(self, ends: Sequence[int], tasks: int = TASKS_SEARCHED) -> _Grouping:
        """Return the options that the search finds for these groups."""
        choice, end_s = timeline(self.groups(ends), self.options).search(tasks)
        return _Grouping(tuple(ends), tuple(choice), end_s)

    def alternated(self, grouping: _Grouping) -> _Grouping:
        """Search options for the groups, then groups for the options, until neither shortens the timeline."""
        for _ in range(MAX_ALTERNATIONS):
            chosen = min(grouping, self.searched(grouping.ends), key=_end_s)
            sizes = [end - begin for begin, end in pairwise((0, *chosen.ends))]
            option_N = [option for option, size in zip(chosen.choice, sizes, strict=True) for _ in range(size)]
            after = self.refined(min(chosen, self.fused(option_N), key=_end_s))
            if not after.end_s < grouping.end_s - MIN_GAIN_S:
                return min(grouping, after, key=_end_s)
            grouping = after
        return grouping

    def refined(self, grouping: _Grouping) -> _Grouping:
        """Join, cut and shift groups one after the other, as long as that shortens the timeline."""
        simulated = index = 0
        while index < len(grouping.ends) and simulated < TENSORS_REFINED:
            others = [self.simulated(ends, choice) for ends, choice in _neighbours(grouping, index)]
            simulated += len(others) * len(self.tensors)
            best = min(others, key=_end_s, default=grouping)
            if best.end_s < grouping.end_s - MIN_GAIN_S:
                grouping, index = best, max(index - 1, 0)
            else:
                index += 1
        return grouping

    def best_of_all(self) -> _Grouping:
        """Try every grouping, with the options that the search finds for it."""
        count = len(self.tensors)
        cuts = range(1 << (count - 1))
        every = [[end for end in range(1, count) if cut >> (end - 1) & 1] + [count] for cut in cuts]
        return min((self.searched(ends, TASKS_SEARCHED // len(every)) for ends in every), key=_end_s)


def plan_grouping(given: CompressionInput) -> GroupingPlan:
    """Return groups and options with a short iteration. Deterministic.

    It is never longer than with one option for all tensors, or for those from a size on, each fused exactly."""
    search = _GroupingSearch(given)
    count = len(given.tensors)
    uniform = [search.fused([option] * count) for option in range(len(given.options))]
    plain = next((index for index, option in enumerate(given.options) if option.name == PLAIN), 0)
    by_size = [
        search.fused([option if tensor.bytes >= least else plain for tensor in given.tensors])
        for option in sorted(range(len(uniform)), key=lambda option: uniform[option].end_s)[:2]
        if option != plain
        for least in _size_thresholds(given.tensors)
    ]
    found = [search.alternated(start) for start in sorted([*uniform, *by_size], key=_end_s)[:STARTS]]
    if count <= TRY_ALL_TENSORS:
        found.append(search.best_of_all())
    best = min(found, key=_end_s)
    names = [option.name for option in given.options]
    return GroupingPlan(
        sizes=tuple(end - begin for begin, end in pairwise((0, *best.ends))),
        options=tuple(names[option] for option in best.choice),
        iteration_time=given.forward_s + best.end_s,
        uniform={name: given.forward_s + one.end_s for name, one in zip(names, uniform, strict=True)},
        runs=tuple(_runs(search, names, best, plain)),
    )


def grouping_time(given: CompressionInput, sizes: Sequence[int], options: Sequence[str]) -> float:
    """Return the seconds of an iteration with these groups. Raises ValueError if they are not groups of these
    tensors."""
    names = [option.name for option in given.options]
    choice = [names.index(option) for option in options]
    return given.forward_s + _GroupingSearch(given).simulated(list(accumulate(sizes)), choice).end_s


def _fused_ends(option: Option, tensors: Sequence[TensorTimes]) -> list[int]:
    """Fuse these tensors exactly; return the ends of the groups.

    The option's work on the device before its first link compresses them, and all its work on links sends them."""
    on_links = [place for place, task in enumerate(option.tasks) if task.on.startswith(LINK)]
    before = option.tasks[: on_links[0]] if on_links else option.tasks
    compress = _total_cost([task for task in before if task.on == DEVICE_NAME])
    send = _total_cost([option.tasks[place] for place in on_links])
    return fuse([(float(one.bytes), one.backward_s) for one in tensors], (*compress, 0.0), send)[0]


def _total_cost(tasks: Sequence[TaskCost]) -> tuple[float, float]:
    return sum(task.alpha for task in tasks), sum(task.beta * task.factor for task in tasks)


def _neighbours(grouping: _Grouping, index: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield ends and choice of the groupings that differ at group `index`: joined with the next, shifted, or cut."""
    ends, choice = grouping.ends, grouping.choice
    begin = ends[index - 1] if index else 0
    if index + 1 < len(ends):
        for option in {choice[index], choice[index + 1]}:
            yield ends[:index] + ends[index + 1 :], (*choice[:index], option, *choice[index + 2 :])
        for end in (ends[index] + 1, ends[index] - 1):
            if begin < end < ends[index + 1]:
                yield (*ends[:index], end, *ends[index + 1 :]), choice
    if ends[index] - begin > 1:
        for cut in {begin + 1, (begin + ends[index]) // 2, ends[index] - 1}:
            yield (*ends[:index], cut, *ends[index:]), (*choice[: index + 1], *choice[index:])


def _size_thresholds(tensors: Sequence[TensorTimes]) -> list[int]:
    """Return sizes that divide the distinct sizes into parts of about equal number, ascending."""
    sizes = sorted({tensor.bytes for tensor in tensors})
    return sorted({sizes[len(sizes) * part // (SIZE_THRESHOLDS + 1)] for part in range(1, SIZE_THRESHOLDS + 1)})


def _runs(search: _GroupingSearch, names: Sequence[str], best: _Grouping, plain: int) -> Iterator[GroupedRun]:
    first = 0  # group of the run
    for option, run in groupby(best.choice):
        count = len(list(run))
        choice = (*best.choice[:first], *[plain] * count, *best.choice[first + count :])
        sooner_s = max(search.simulated(best.ends, choice).end_s - best.end_s, 0.0)
        begin = best.ends[first - 1] if first else 0
        yield GroupedRun(begin, best.ends[first + count - 1], names[option], count, sooner_s)
        first += count
