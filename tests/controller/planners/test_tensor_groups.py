from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.tensor_compression.compression import (
    CompressionInput,
    Option,
    TaskCost,
    TensorTimes,
    timeline,
)
from atoll.controller.planners.tensor_compression.tensor_groups import grouping_time, plan_grouping
from atoll.errors import BadInput

SECONDS = st.floats(0, 2)
PER_BYTE = st.floats(0, 0.2)


def option(name: str, on: str, alpha: float, per_byte: float, cost: float = 0.01) -> Option:
    return Option(
        name=name,
        tasks=(
            TaskCost(on=on, alpha=alpha, beta=cost),
            TaskCost(on="link", alpha=alpha, beta=per_byte, factor=0.1),
            TaskCost(on=on, alpha=alpha, beta=cost),
        ),
    )


@st.composite
def cases(draw: st.DrawFn, most: int = 5) -> CompressionInput:
    per_byte, alpha = draw(PER_BYTE), draw(SECONDS)
    tensors = st.builds(TensorTimes, bytes=st.integers(0, 40), backward_s=SECONDS)
    return CompressionInput(
        forward_s=1.0,
        tensors=tuple(draw(st.lists(tensors, min_size=1, max_size=most))),
        options=(
            Option(name="none", tasks=(TaskCost(on="link", alpha=alpha, beta=per_byte),)),
            option("here", "gpu", draw(SECONDS), per_byte),
            option("there", "cpu", draw(SECONDS), per_byte),
        ),
    )


def every(case: CompressionInput) -> float:
    """The shortest of all groupings and all options."""
    count, best_s = len(case.tensors), float("inf")
    for cut in range(count):
        for cuts in itertools.combinations(range(1, count), cut):
            bounds = [0, *cuts, count]
            groups = [
                TensorTimes(
                    bytes=sum(one.bytes for one in case.tensors[begin:end]),
                    backward_s=min(sum(one.backward_s for one in case.tensors[begin:end]), 1e6),
                )
                for begin, end in itertools.pairwise(bounds)
            ]
            line = timeline(groups, case.options)
            for choice in itertools.product(range(len(case.options)), repeat=len(groups)):
                best_s = min(best_s, line.end_s(choice))
    return case.forward_s + best_s


@settings(max_examples=30, deadline=None)
@given(cases())
def test_of_few_tensors_no_grouping_is_sooner(case: CompressionInput) -> None:
    plan = plan_grouping(case)
    assert sum(plan.sizes) == len(case.tensors)
    assert plan.iteration_time <= min(plan.uniform.values()) + 1e-9
    best_s = every(case)
    assert best_s - 1e-9 <= plan.iteration_time <= best_s + 1e-9
    assert grouping_time(case, plan.sizes, plan.options) == pytest.approx(plan.iteration_time)


def test_of_more_tensors_than_are_tried_in_every_way_it_is_near_the_best() -> None:
    """Nine tensors: 256 groupings with up to 3^9 options each. Of 12 cases the worst is no 3 % longer than the best."""
    for seed in range(12):
        sizes = [(seed * 7919 + 31 * i * i) % 97 for i in range(9)]
        case = CompressionInput(
            forward_s=0.0,
            tensors=tuple(TensorTimes(bytes=size, backward_s=0.2 + size % 5 / 5) for size in sizes),
            options=(
                Option(name="none", tasks=(TaskCost(on="link", alpha=0.3, beta=0.02 + seed % 7 / 100),)),
                option("there", "cpu", 0.2, 0.05),
            ),
        )
        assert plan_grouping(case).iteration_time <= every(case) * 1.03


def test_runs_say_how_much_sooner_they_are() -> None:
    case = CompressionInput(
        forward_s=0.0,
        tensors=(TensorTimes(bytes=10, backward_s=0.1),) * 3 + (TensorTimes(bytes=10_000, backward_s=0.1),) * 2,
        options=(
            Option(name="none", tasks=(TaskCost(on="link", alpha=0.001, beta=0.001),)),
            option("here", "gpu", 0.0, 0.001, 1e-5),
        ),
    )
    plan = plan_grouping(case)
    (run,) = [run for run in plan.runs if run.option == "here"]
    assert (run.begin, run.end) == (3, 5) or run.begin <= 3
    assert run.sooner > 0


def test_groups_of_another_model_are_refused() -> None:
    case = CompressionInput(
        forward_s=0.0,
        tensors=(TensorTimes(bytes=1, backward_s=1.0),),
        options=(Option(name="none", tasks=()),),
    )
    with pytest.raises((BadInput, ValueError)):
        grouping_time(case, [1], ["other"])
