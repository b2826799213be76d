from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.controller.planners.batches.goodput import candidates_between, efficiency, learning_rate_factor
from atoll.controller.planners.registry import PLANNERS
from atoll.errors import NoFeasiblePlan

NODES = [{"q": 0.001, "s": 0.01, "k": 0.002, "m": 0.01}, {"q": 0.002, "s": 0.01, "k": 0.004, "m": 0.01}]


def run(**changes: Any) -> Any:
    data = {
        "candidates": [32, 64, 128, 256, 512],
        "nodes": NODES,
        "gamma": 0.2,
        "t_o": 0.05,
        "t_u": 0.02,
        "noise_scale": 500,
        "initial_batch": 32,
    }
    return json.loads(PLANNERS["goodput"].run_json(json.dumps(data | changes)))


def test_the_chosen_candidate_has_the_most_goodput_of_all() -> None:
    plan = run()
    best = max(plan["candidates"], key=lambda c: c["goodput"])
    assert plan["total_batch"] == best["total_batch"] == sum(plan["batches"])
    assert plan["goodput"] == pytest.approx(best["goodput"], rel=0.01)  # whole samples cost a little
    assert [c["total_batch"] for c in plan["candidates"]] == [32, 64, 128, 256, 512]


def test_noise_calls_for_larger_batches_and_a_clear_gradient_for_small_ones() -> None:
    chosen = [run(noise_scale=noise)["total_batch"] for noise in (0, 100, 1000, 100_000)]
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (32, 512)


def test_a_sample_of_the_initial_batch_is_worth_one() -> None:
    assert efficiency(700.0, 64, 64) == 1
    assert efficiency(0.0, 64, 256) == 0.25
    assert efficiency(192.0, 64, 256) == pytest.approx(256 / 448)


def test_the_split_is_that_of_optperf() -> None:
    plan = run(candidates=[128])
    optperf = {"total_batch": 128, "nodes": NODES, "gamma": 0.2, "t_o": 0.05, "t_u": 0.02}
    alone = json.loads(PLANNERS["optperf"].run_json(json.dumps(optperf)))
    assert plan["batches"] == alone["batches"]
    assert plan["step_time"] == alone["step_time"]
    assert plan["candidates"][0]["optperf"] == alone["optperf"]


def test_candidates_that_the_bounds_cannot_hold_are_listed_without_a_goodput() -> None:
    plan = run(nodes=[node | {"min_batch": 20, "max_batch": 60} for node in NODES])
    assert [c["goodput"] is not None for c in plan["candidates"]] == [False, True, False, False, False]
    assert plan["total_batch"] == 64


def test_no_candidate_that_fits_is_an_error() -> None:
    with pytest.raises(NoFeasiblePlan, match="none of the 2 candidates, 500 to 600, fits the bounds of 2 nodes"):
        run(candidates=[500, 600], nodes=[node | {"max_batch": 60} for node in NODES])


@given(st.floats(0, 1e9), st.integers(1, 10_000), st.integers(0, 10_000))
def test_adascale_lies_between_one_and_the_growth_of_the_batch(noise: float, initial: int, more: int) -> None:
    scale = (initial + more) / initial
    gain = learning_rate_factor("adascale", noise, initial, initial + more)
    assert 1 - 1e-9 <= gain <= scale * (1 + 1e-9)
    trace, sqnorm = noise, 1.0  # the published form, for |G|^2 = 1
    published = (trace / initial + sqnorm) / (trace / (initial + more) + sqnorm)
    assert gain == pytest.approx(published, rel=1e-9)


def test_the_learning_rate_follows_the_rule_that_was_asked_for() -> None:
    assert run(candidates=[128], rule="square-root")["learning_rate_factor"] == 2
    assert run(candidates=[128], noise_scale=0)["learning_rate_factor"] == 1
    assert run(candidates=[128], noise_scale=1e15)["learning_rate_factor"] == pytest.approx(4)


def test_accumulated_batches_count_as_one_for_the_learning_rate_and_for_what_a_sample_is_worth() -> None:
    """Four batches of 64 an update, which become 309: AdaScale's gain from 256 to 1,236 samples is 3.2, not the 4.24 of
    64 to 309; the square root is 2.2 either way."""
    noise = 1702.0
    asked = {"candidates": [309], "noise_scale": noise, "initial_batch": 64}
    assert run(**asked)["learning_rate_factor"] == pytest.approx(4.24, abs=0.01)
    four = run(**asked, batches_per_update=4)
    assert four["learning_rate_factor"] == pytest.approx((noise / 256 + 1) / (noise / 1236 + 1))
    assert four["learning_rate_factor"] == pytest.approx(3.2, abs=0.02)
    assert four["efficiency"] == pytest.approx((noise + 256) / (noise + 1236))
    assert run(**asked, batches_per_update=4, rule="square-root")["learning_rate_factor"] == pytest.approx(
        2.197, abs=0.001
    )


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 200))
def test_candidates_ascend_in_equal_ratios_from_end_to_end(low: int, more: int, count: int) -> None:
    found = candidates_between(low, low + more, count)
    assert list(found) == sorted(set(found))
    assert found[0] == low
    assert len(found) <= count
    assert count == 1 or found[-1] == low + more


def test_candidates_double_where_the_range_has_room_for_it() -> None:
    assert candidates_between(32, 512, 5) == (32, 64, 128, 256, 512)
    assert candidates_between(1, 4, 100) == (1, 2, 3, 4)
