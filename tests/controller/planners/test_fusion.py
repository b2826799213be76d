from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.tensor_compression.compression import TensorTimes
from atoll.controller.planners.tensor_compression.fusion import CompressCost, FusionInput, LinkCost, plan_fusion

ALPHA = st.one_of(st.just(0.0), st.floats(1e-3, 5))
BETA = st.one_of(st.just(0.0), st.floats(1e-3, 1))

cases = st.builds(
    FusionInput,
    tensors=st.lists(st.builds(TensorTimes, bytes=st.integers(0, 20), backward_s=ALPHA), min_size=1, max_size=9).map(
        tuple
    ),
    forward_s=ALPHA,
    compress=st.builds(CompressCost, alpha=ALPHA, beta=BETA, floor_bytes=st.sampled_from([0, 5, 30])),
    communicate=st.builds(LinkCost, alpha=ALPHA, beta=BETA),
)


def end_s(case: FusionInput, cuts: tuple[int, ...]) -> float:
    """Cupcake, Section 5.3: groups are compressed where the backward pass runs, and sent one after the other."""
    computed_s = sent_s = 0.0
    for begin, end in itertools.pairwise((0, *cuts, len(case.tensors))):
        size = sum(tensor.bytes for tensor in case.tensors[begin:end])
        computed_s += sum(tensor.backward_s for tensor in case.tensors[begin:end])
        computed_s += case.compress.alpha + case.compress.beta * max(size, case.compress.floor_bytes)
        sent_s = max(computed_s, sent_s) + case.communicate.alpha + case.communicate.beta * size
    return case.forward_s + sent_s


def every_grouping(case: FusionInput) -> list[tuple[int, ...]]:
    inner = range(1, len(case.tensors))
    return [cuts for count in range(len(case.tensors)) for cuts in itertools.combinations(inner, count)]


@settings(max_examples=80, deadline=None)
@given(cases)
def test_no_grouping_is_sooner(case: FusionInput) -> None:
    plan = plan_fusion(case)
    best = min(end_s(case, cuts) for cuts in every_grouping(case))
    assert plan.iteration_time == pytest.approx(best, rel=1e-9)
    assert [i for group in plan.groups for i in group] == list(range(len(case.tensors)))
    assert end_s(case, tuple(group[0] for group in plan.groups[1:])) == pytest.approx(best, rel=1e-9)


def case_of(sizes: list[int], compress: CompressCost, communicate: LinkCost) -> FusionInput:
    tensors = tuple(TensorTimes(bytes=size, backward_s=1.0) for size in sizes)
    return FusionInput(tensors=tensors, forward_s=0.0, compress=compress, communicate=communicate)


def test_a_fixed_cost_of_compressing_fuses_and_none_of_either_does_not() -> None:
    free = LinkCost(alpha=0.0, beta=0.01)
    dear = plan_fusion(case_of([1, 1, 1, 1], CompressCost(alpha=9.0, beta=0.0), free))
    assert dear.groups == ((0, 1, 2, 3),)
    cheap = plan_fusion(case_of([900, 900, 900], CompressCost(alpha=0.0, beta=0.0), free))
    assert cheap.groups == ((0,), (1,), (2,))


def test_below_the_floor_compressing_more_costs_nothing() -> None:
    """Three of 2 bytes below a floor of 6: one call costs what each alone would."""
    case = case_of([2, 2, 2], CompressCost(alpha=0.0, beta=1.0, floor_bytes=6), LinkCost(alpha=0.0, beta=0.001))
    assert plan_fusion(case).groups == ((0, 1, 2),)
