from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from measured_runs import EVEN, given, measured, ranks

from atoll.controller.deciding.batch import SETTLED_STEPS
from atoll.controller.deciding.given import Policy
from atoll.controller.deciding.next import next_plan
from atoll.controller.estimators.profile import NoiseEstimate, OverlapEstimate
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import JobPins
from atoll.step_estimators.rank import WHOLE_STEPS

ADAPTIVE = Policy(min_batch=64, max_batch=4096, initial_batch=256)
LIKE = ((0.001, 0.05),) * 3
SHARED = OverlapEstimate(gamma=0.2, t_o=0.05, t_u=0.01, error_s=0.0005)
SECOND = replace(EVEN, id=2, total_batch=256, learning_rate_factor=1.0)


def noise(scale: float, error: float = 0.0) -> NoiseEstimate:
    high = scale / (1 - 2 * error) if error < 0.5 else math.inf
    return NoiseEstimate(noise_scale=scale, error=error, low=scale / (1 + 2 * error), high=high, steps=50)


def test_noisy_gradients_bear_a_larger_batch_and_a_higher_learning_rate() -> None:
    plan = next_plan(given(measured(*LIKE), current=SECOND, policy=ADAPTIVE, noise=noise(4000), overlap=SHARED))
    assert plan is not None
    assert plan.planner == "goodput"
    assert plan.total_batch == 512  # twice at most
    assert sum(plan.shares) == 512
    assert plan.learning_rate_factor == pytest.approx(2 * (4000 + 256) / (4000 + 512))
    assert plan.reason.startswith("gradient noise scale 4000: batch 256 → 512, local batches 86/85/85 → 171/171/170")
    assert PLANNERS["goodput"].run_json(plan.input) == plan.output
    assert plan.predicted_s == pytest.approx(json.loads(plan.output)["step_time"], rel=0.05)


def test_a_batch_grows_no_further_than_memory_holds() -> None:
    wants = given(measured(*LIKE), current=SECOND, policy=ADAPTIVE, noise=noise(4000), overlap=SHARED)
    plan = next_plan(replace(wants, max_batches=(120, 130, 110)))
    assert plan is not None
    assert 256 < plan.total_batch <= 360
    assert all(share <= most for share, most in zip(plan.shares, (120, 130, 110), strict=True))
    assert "; memory bounds the share of rank" in plan.reason
    assert next_plan(replace(wants, max_batches=(90, 85, 85))) is None
    explores = given(ranks(0.001, 0.001, 0.001), policy=ADAPTIVE, sampled_steps=5)
    free, bound = next_plan(explores), next_plan(replace(explores, max_batches=(90, 90, 90)))
    assert free is not None
    assert bound is not None
    assert (free.total_batch, bound.total_batch) == (320, 270)


def test_accumulated_batches_are_one_to_the_learning_rate() -> None:
    policy = replace(ADAPTIVE, batches_per_update=4)
    plan = next_plan(given(measured(*LIKE), current=SECOND, policy=policy, noise=noise(16_000), overlap=SHARED))
    assert plan is not None
    assert plan.total_batch == 512
    assert plan.learning_rate_factor == pytest.approx(2 * (16_000 + 1024) / (16_000 + 2048))


def test_quiet_gradients_bear_a_smaller_one_within_the_users_range() -> None:
    quiet = {"current": SECOND, "noise": noise(10), "overlap": SHARED}
    plan = next_plan(given(measured(*LIKE), policy=ADAPTIVE, **quiet))
    assert plan is not None
    assert (plan.total_batch, plan.learning_rate_factor < 1) == (128, True)
    assert next_plan(given(measured(*LIKE), policy=replace(ADAPTIVE, min_batch=256), **quiet)) is None


def test_what_is_gained_must_exceed_what_is_not_known() -> None:
    unsure = given(measured(*LIKE, error=0.2), current=SECOND, policy=ADAPTIVE, noise=noise(4000), overlap=SHARED)
    step = next_plan(unsure)
    assert step is not None
    assert (step.total_batch, "a step towards 512" in step.reason) == (320, True)
    sure = given(measured(*LIKE), current=SECOND, policy=ADAPTIVE, noise=noise(1500), overlap=SHARED)
    assert next_plan(sure) is not None
    perhaps_less = given(measured(*LIKE), current=SECOND, policy=ADAPTIVE, noise=noise(1500, error=2.5), overlap=SHARED)
    assert next_plan(perhaps_less) is None
    much_or_more = given(measured(*LIKE), current=SECOND, policy=ADAPTIVE, noise=noise(9000, error=0.6), overlap=SHARED)
    assert next_plan(much_or_more) is not None


@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        (replace(ADAPTIVE, rule="square-root"), 2**0.5),
        (replace(ADAPTIVE, rule="none"), 1.0),
    ],
)
def test_the_learning_rates_rule_is_the_users(policy: Policy, factor: float) -> None:
    plan = next_plan(given(measured(*LIKE), current=SECOND, policy=policy, noise=noise(4000), overlap=SHARED))
    assert plan is not None
    assert plan.learning_rate_factor == pytest.approx(factor)


def test_a_learning_rate_that_no_longer_fits_the_noise_is_mended_without_another_batch() -> None:
    policy = replace(ADAPTIVE, min_batch=256, max_batch=512)
    current = replace(SECOND, total_batch=512, learning_rate_factor=1.2)
    at_512 = measured(*LIKE, batches=(171, 171, 170))
    plan = next_plan(given(at_512, current=current, policy=policy, noise=noise(4000), overlap=SHARED))
    assert plan is not None
    assert (plan.total_batch, round(plan.learning_rate_factor, 2)) == (512, 1.89)
    assert "it was x 1.2" in plan.reason
    assert next_plan(given(at_512, current=replace(plan, id=2), policy=policy, noise=noise(4000))) is None


def test_ranks_measured_with_one_batch_only_are_shown_another_once() -> None:
    same = ranks(0.001, 0.001, 0.001)
    assert next_plan(given(same, policy=ADAPTIVE)) is None  # of what it is worth nothing will be known
    plan = next_plan(given(same, policy=ADAPTIVE, sampled_steps=1))
    assert plan is not None
    assert (plan.total_batch, sum(plan.shares), plan.reason) == (
        320, 320.0, "batch 256 → 320: to learn how the step's time depends on it",
    )  # fmt: skip
    other = ranks(0.001, 0.001, 0.001, plan=2, batches=(107, 107, 106))
    again = given(other, current=plan, policy=ADAPTIVE, sampled_steps=9)
    assert next_plan(again) is None
    assert next_plan(given(same, policy=replace(ADAPTIVE, initial_batch=0), sampled_steps=9)) is None
    full = replace(ADAPTIVE, max_batch=256)
    smaller = next_plan(given(same, policy=full, sampled_steps=9))
    assert smaller is not None
    assert smaller.total_batch == 204


def test_a_pinned_batch_is_left_alone_and_its_split_is_not() -> None:
    policy = replace(ADAPTIVE, pins=JobPins(total_batch=256))
    assert next_plan(given(measured(*LIKE), current=SECOND, policy=policy, noise=noise(4000))) is None
    uneven = measured((0.001, 0.0), (0.001, 0.0), (0.004, 0.0))
    plan = next_plan(given(uneven, current=SECOND, policy=policy, noise=noise(4000)))
    assert plan is not None
    assert (plan.planner, plan.total_batch) == ("optperf", 256)


def test_as_many_steps_as_a_small_step_waits_for_are_remembered() -> None:
    """20 were waited for and 16 remembered: after its first small step a batch was not moved towards the best again."""
    assert SETTLED_STEPS <= WHOLE_STEPS
