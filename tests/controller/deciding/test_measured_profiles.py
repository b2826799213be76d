"""Whatever workers measure, the estimators make a profile of it and every planner takes that: a refusal would leave the
job's plan as it is for as long as the measurement lasts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.deciding.given import Given, Policy, controller_half
from atoll.controller.deciding.next import next_plan
from atoll.controller.estimators.bandwidth import ObservedLink
from atoll.controller.estimators.run import RunEstimators
from atoll.controller.jobs.admission.admitting import AdmissionQuestion, RatedDevice, answer, dispensable
from atoll.controller.jobs.admission.one_island import island_times
from atoll.controller.planners.islands.one_island import OneIslandInput, compare_one_island
from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.controller.state.records import PlanRecord
from atoll.errors import NoFeasiblePlan
from atoll.step_estimators.observed import ObservedStep

RANKS = 3
ISLANDS = {0: "a", 1: "b", 2: "b"}
GRID = Surrogate(sparsities=(0.0, 0.9, 0.999), batches=(1.0, 1e6), extra=((0.0, 0.1), (0.1, 0.2), (0.5, 0.6)))

Line = tuple[float, float]
"""Seconds that a device takes for the largest batch, and the part of them that is the same for any batch."""

seconds = st.floats(-9.0, 6.0).map(lambda power: 10**power) | st.sampled_from([4e-3, 1.0, 0.0, 1e9, 1e300])
fixed_parts = st.sampled_from([0.0, 1.0, 1 - 1e-12, 1e-12]) | st.floats(0, 1)
lines = st.lists(st.tuples(seconds, fixed_parts), min_size=RANKS, max_size=RANKS)
batches = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300), min_size=2, max_size=3, unique=True)
noises = st.floats(0.9, 1.1)
norms = st.tuples(*[st.sampled_from([0.0, 1e-300, 1e-150, 1.0, 1e150, 1e300]) | st.floats(0, 1e9)] * 2)
links_bps = st.sampled_from([1e-3, 8.0, 1e6, 1e12, 1e30])
metrics = st.fixed_dictionaries(
    {
        name: st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e6])
        for name in ("stall_s", "select_s", "apply_s", "round_s", "drift", "advantage")
    }
    | {"sparsity": st.sampled_from([0.0, 0.5, 0.9999, 0.99999]), "every": st.sampled_from([1.0, 8.0])}
)


@dataclass(frozen=True)
class Measured:
    """of_rank: how long each takes. local: the batches of each rank, one after the other. norm: squared, of each rank's
    own gradient and of the combined one."""

    of_rank: list[Line]
    local: list[int]
    noise: float = 1.0
    norm: tuple[float, float] = (2.0, 1.0)
    link_bps: float = 1e9
    told: dict[str, float] = field(default_factory=dict)


def run_of(measured: Measured) -> RunEstimators:
    """Estimators of a run that trained some steps with each of the batches, all of its ranks alike."""
    of_rank, local, norm = measured.of_rank, measured.local, measured.norm
    half = controller_half("local-steps", {})
    assert half is not None
    estimators = RunEstimators(half.estimator())
    step = 0
    for plan, batch in enumerate([*local, local[0]], start=1):
        part = batch / max(local)
        for wobble in itertools.islice(itertools.cycle((1.0, measured.noise)), 40 if plan == 1 else 20):
            for rank, (whole_s, fixed) in enumerate(of_rank):
                took_s = whole_s * (fixed + (1 - fixed) * part) * wobble
                estimators.observe(
                    rank,
                    ObservedStep(
                        step=step,
                        plan=plan,
                        local_batch=batch,
                        total_batch=batch * RANKS,
                        step_s=took_s,
                        compute_s=took_s,
                        forward_s=took_s / 3,
                        backward_s=took_s * 2 / 3,
                        first_bucket_s=took_s / 9,
                        sync_s=took_s,
                        last_sync_s=took_s / 4,
                        local_grad_sqnorm=norm[0] * wobble,
                        global_grad_sqnorm=norm[1],
                        strategy_metrics=measured.told,
                    ),
                )
            step += 1
    estimators.observe_entries(25_000_000)
    for now_s in range(8):
        sent = int(min(measured.link_bps * now_s / 8, 2**62))
        for rank, peer in ((0, 1), (1, 0), (2, 0)):
            link = ObservedLink(peer=peer, sent_bytes=sent, busy_s=float(now_s))
            estimators.observe_links(rank, ISLANDS, [link], float(now_s))
    return estimators


def decide(strategy: str, made: RunEstimators, adapts: bool) -> None:
    profile = made.profile()
    began = first_plan(1, "auto", [Place(name, 0, 1.0) for name in "abc"], {}, 300)
    half = controller_half(strategy, {})
    params = {"stale-sparse": {"sparsity": 0.9}, "local-steps": {"density": 0.2, "every": 1}}.get(strategy, {})
    current: PlanRecord = replace(began, id=profile.plan, strategy_params=params)
    policy = Policy(
        half=half,
        adapts=tuple(params),
        min_batch=1 if adapts else 0,
        max_batch=2**33 if adapts else 0,
        initial_batch=300,
        surrogate=GRID if adapts else None,
    )
    asked = Given(
        now_s=100.0,
        planned_s=0.0,
        current=current,
        profile=profile,
        policy=policy,
        islands=tuple(ISLANDS.values()),
    )
    try:
        next_plan(asked)
    except NoFeasiblePlan:
        assert strategy == "stale-sparse"  # links too thin for any sparsity: that is an answer, and an event says it


def admit(made: RunEstimators) -> None:
    profile = made.profile()
    workers = [RatedDevice(f"node-{rank}", 1.0) for rank in range(RANKS)]
    offers = [RatedDevice("known", 1e-9), RatedDevice("unknown", 0.0)]
    asked = AdmissionQuestion(
        profile=profile,
        workers=workers,
        offers=offers,
        learned={"known": 1e-9},
        split="auto",
        batch_range=None,
        restart_s=1e9,
    )
    answer(asked)
    dispensable(asked)
    ranks = [profile.ranks[rank] for rank in sorted(profile.ranks) if profile.ranks[rank].local_batch > 0]
    if len(ranks) == RANKS and profile.step_s > 0:
        islands = (island_times("a", ranks[:1]), island_times("b", ranks[1:]))
        compare_one_island(OneIslandInput.of_measured(islands=islands, step_s=profile.step_s))


ASKED: dict[str, Callable[[RunEstimators], None]] = {
    "optperf": lambda made: decide("dense", made, adapts=False),
    "goodput": lambda made: decide("dense", made, adapts=True),
    "tta": lambda made: decide("stale-sparse", made, adapts=True),
    "exchange-density": lambda made: decide("local-steps", made, adapts=False),
    "admission": admit,
}


@pytest.mark.parametrize("planner", ASKED)
@given(st.builds(Measured, of_rank=lines, local=batches, noise=noises, norm=norms, link_bps=links_bps, told=metrics))
@settings(max_examples=25, deadline=None)
@example(Measured([(4e-3, 0.999), (2e-3, 1.0), (4e-3, 1.0)], [262_144, 200_000]))
@example(Measured([(1e-9, 1.0), (1e6, 1.0), (1e6, 0.0)], [2**32 - 1, 1], link_bps=8.0))
def test_every_planner_takes_what_estimators_make_of_any_timing(planner: str, measured: Measured) -> None:
    """262,144 samples in 4 ms, of which hardly any goes with the samples, were the first that a planner refused."""
    ASKED[planner](run_of(measured))
