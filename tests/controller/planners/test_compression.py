from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.registry import PLANNERS
from atoll.controller.planners.tensor_compression.compression import (
    CompressionInput,
    Option,
    TaskCost,
    TensorTimes,
    plan_compression,
    timeline,
)
from atoll.errors import BadInput

SECONDS = st.one_of(st.just(0.0), st.integers(1, 12).map(float))
"""Whole ones: sums are exact, so that equal times are equal, and ties are common."""

tensors = st.builds(TensorTimes, bytes=st.integers(0, 6), backward_s=SECONDS)
tasks = st.builds(
    TaskCost,
    on=st.sampled_from(["gpu", "gpu", "cpu", "link", "link-wan"]),
    alpha=SECONDS,
    beta=st.sampled_from([0.0, 0.5, 1.0]),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)


def options_of(chains: Sequence[Sequence[TaskCost]]) -> tuple[Option, ...]:
    return tuple(Option(name=f"o{i}", tasks=tuple(chain)) for i, chain in enumerate(chains))


chains = st.lists(st.lists(tasks, max_size=4), min_size=1, max_size=3).map(options_of)


def end_s(given_tensors: Sequence[TensorTimes], chosen: Sequence[Option]) -> float:
    """The rules of docs/planners.md once more, for nothing but being right: time goes from one instant at which
    something may begin to the next, and each resource looks through all tasks there are."""
    durations = [
        [task.alpha + task.beta * tensor.bytes * task.factor for task in option.tasks]
        for tensor, option in zip(given_tensors, chosen, strict=True)
    ]
    now, ready, place, last = 0.0, [0.0] * len(chosen), [0] * len(chosen), 0.0
    for i, tensor in enumerate(given_tensors):
        now += tensor.backward_s
        while place[i] < len(durations[i]) and chosen[i].tasks[place[i]].on == "gpu":
            now += durations[i][place[i]]
            place[i] += 1
        ready[i] = now
    device_free = now
    free: dict[str, float] = {}
    while waiting := [i for i in range(len(chosen)) if place[i] < len(durations[i])]:

        def start(i: int) -> float:
            on = chosen[i].tasks[place[i]].on
            return max(ready[i], free.get(on, device_free if on == "gpu" else 0.0))

        at = min(start(i) for i in waiting)
        by_resource: dict[str, list[int]] = {}
        for i in waiting:
            if start(i) == at:
                by_resource.setdefault(chosen[i].tasks[place[i]].on, []).append(i)
        heads = [min(each, key=lambda i: (ready[i], i)) for each in by_resource.values()]
        # What takes no time may bring more that is ready at the same instant.
        i = min([i for i in heads if durations[i][place[i]] == 0] or heads)
        on = chosen[i].tasks[place[i]].on
        free[on] = ready[i] = at + durations[i][place[i]]
        last = max(last, ready[i])
        place[i] += 1
    return max(last, device_free)


def every_end(case: CompressionInput) -> dict[tuple[int, ...], float]:
    line = timeline(case.tensors, case.options)
    return {c: line.end_s(c) for c in itertools.product(range(len(case.options)), repeat=len(case.tensors))}


def case_of(*given_tensors: tuple[int, float], options: Sequence[Option], forward_s: float = 0.0) -> CompressionInput:
    rows = tuple(TensorTimes(bytes=size, backward_s=backward_s) for size, backward_s in given_tensors)
    return CompressionInput(forward_s=forward_s, tensors=rows, options=tuple(options))


def task(on: str, alpha: float, beta: float = 0.0, factor: float = 1.0) -> TaskCost:
    return TaskCost(on=on, alpha=alpha, beta=beta, factor=factor)


@settings(max_examples=80, deadline=None)
@given(st.lists(tensors, min_size=1, max_size=5), chains, st.data())
def test_the_timeline_ends_when_the_rules_say(
    given_tensors: list[TensorTimes], options: tuple[Option, ...], data: st.DataObject
) -> None:
    index = st.integers(0, len(options) - 1)
    choice = data.draw(st.lists(index, min_size=len(given_tensors), max_size=len(given_tensors)))
    line, chosen = timeline(given_tensors, options), [options[i] for i in choice]
    assert line.end_s(choice) == end_s(given_tensors, chosen)


def test_a_device_compresses_before_it_goes_on_and_decompresses_after_all() -> None:
    """Backward 1 + compress 2 + backward 1 + compress 2 = 6; sent from 3 and from 6 on, 4 each: 7 and 11; decompressed
    by 12."""
    option = Option(name="a", tasks=(task("gpu", 2), task("link", 4), task("gpu", 1)))
    line = timeline(case_of((1, 1), (1, 1), options=[option]).tensors, [option])
    assert line.end_s([0, 0]) == 12


@settings(max_examples=50, deadline=None)
@given(st.lists(tensors, min_size=1, max_size=5), chains)
def test_small_cases_are_exact(given_tensors: list[TensorTimes], options: tuple[Option, ...]) -> None:
    case = CompressionInput(forward_s=3.0, tensors=tuple(given_tensors), options=options)
    plan, ends = plan_compression(case), every_end(case)
    assert plan.iteration_time == 3.0 + min(ends.values())
    names = {option.name: i for i, option in enumerate(options)}
    assert ends[tuple(names[name] for name in plan.options)] == min(ends.values())


def hard_case(seed: int, count: int, kinds: int) -> CompressionInput:
    """Options that each win somewhere: on either processor, and to three sizes."""
    rows = [((7919 * (i + seed) ** 2) % 4000 * 1000, (31 * (i + 3 * seed) % 9 + 1) * 1e-4) for i in range(count)]
    options = [Option(name="none", tasks=(task("link", 1e-4, 1.5e-9),))]
    for where, slow in (("gpu", 1.0), ("cpu", 3.0)):
        for name, factor in (("x4", 0.25), ("x32", 0.03)):
            packed = (
                task(where, 2e-4 * slow, 3e-10 * slow),
                task("link", 1e-4, 1.5e-9, factor),
                task(where, 1e-4 * slow),
            )
            options.append(Option(name=f"{name} {where}", tasks=packed))
    return case_of(*rows, options=options[:kinds])


@pytest.mark.parametrize("seed", range(6))
def test_larger_cases_are_within_one_percent_of_trying_everything(seed: int) -> None:
    case = hard_case(seed, count=7, kinds=5)
    best = min(every_end(case).values())
    assert len(case.options) ** len(case.tensors) > 4096
    assert best <= plan_compression(case).iteration_time <= 1.01 * best


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_never_longer_than_one_option_for_all_or_two_by_size(seed: int) -> None:
    case = hard_case(seed, count=60, kinds=5)
    plan, line = plan_compression(case), timeline(case.tensors, case.options)
    sizes = sorted({tensor.bytes for tensor in case.tensors})
    ends = [
        line.end_s([large if tensor.bytes >= size else small for tensor in case.tensors])
        for large, small in itertools.product(range(5), repeat=2)
        for size in (0, *sizes[:: max(1, len(sizes) // 8)])
    ]
    assert plan.iteration_time <= min(ends) * (1 + 1e-12)


def test_what_was_sent_before_a_bubble_is_not_compressed() -> None:
    """The first tensor is sent while the second's long backward pass goes on: compressing it would only delay that."""
    none = Option(name="none", tasks=(task("link", 0.0, 1.0),))
    packed = Option(name="packed", tasks=(task("gpu", 1.0), task("link", 0.0, 1.0, 0.1)))
    plan = plan_compression(case_of((20, 1), (40, 50), options=[none, packed]))
    assert plan.options == ("none", "packed")
    assert plan.iteration_time == 51 + 1 + 4


def test_what_is_refused_is_refused_by_name() -> None:
    example: dict[str, Any] = json.loads(PLANNERS["compression"].example)
    twice = example | {"options": [example["options"][0]] * 2}
    with pytest.raises(BadInput, match=r"options\[1\].name = 'none' is there twice"):
        PLANNERS["compression"].run_json(json.dumps(twice))
    with pytest.raises(BadInput, match="options"):
        PLANNERS["compression"].run_json(json.dumps(example | {"options": []}))
    with pytest.raises(BadInput, match="tensors"):
        PLANNERS["compression"].run_json(json.dumps(example | {"tensors": []}))
