"""An island whose link holds all others waits, in jobs of four islands with a device each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from made import NOW_S, changed, clock, free, job, node, observed, profile, run, spec, worker

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.estimators.profile import LinkEstimate
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import JobStep, ObservedJob, ObservedViews, ViewStage, WorkerViewReport
from atoll.controller.planners.registry import EXCHANGE_DENSITY
from atoll.controller.state.records import Cause, JobPhase, JobRecord, PlanRecord
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState

NAMES = ("a", "b", "c", "d")
MBIT = 1e6


def planned(*bandwidths_bps: float) -> PlanRecord:
    """What islands send, chosen for these links: the second plan."""
    given = {
        "entries": 25_000_000,
        "bandwidths": [one / 8 for one in bandwidths_bps],
        "step_s": 0.08,
        "value_bytes": 0.2578125,
        "enough": 0.2,
    }
    decision = EXCHANGE_DENSITY.decide(EXCHANGE_DENSITY.read(json.dumps(given)))
    first = first_plan(1, "even", [Place(name, 0, 1.0) for name in NAMES], {}, 0)
    return replace(first, id=2, planner=EXCHANGE_DENSITY.name, input=decision.input, output=decision.output)


def training(
    *links_bps: float,
    islands: tuple[str, ...] = NAMES,
    chosen: bool = True,
    of: JobRecord | None = None,
    **fields: Any,
) -> ObservedJob:
    """A run that has trained for 20 s under the plan for its links, which were measured. Each rank computes 60 of 240
    samples in 80 ms."""
    record = of or job(spec=spec(max_workers=4, strategy="local-steps"))
    bare = run(*NAMES)
    members = [replace(one, island=island) for one, island in zip(bare.members, islands, strict=True)]
    own = dict(zip(sorted(set(islands)), links_bps, strict=True))
    links = {name: LinkEstimate(bandwidth_bps=min(links_bps), error=0.05) for name in own}  # all are held up by one
    paths = {(a, b): min(own[a], own[b]) for a in own for b in own if a != b}
    second = planned(*links_bps) if chosen else replace(planned(*links_bps), planner="optperf")
    return observed(
        record,
        replace(bare, members=tuple(members)),
        *(node(name, {rank: worker()}, work_per_s=1.0) for rank, name in enumerate(NAMES)),
        profile=profile(1, 1, 1, 1, plan=2, links=links, paths=paths, entries=25_000_000),
        issued=(second,),
        **fields,
    )


def look(*links_bps: float, **fields: Any) -> JobStep:
    return next_step(training(*links_bps, **fields), clock())


def stays(step: JobStep) -> bool:
    return step.job.status.phase is JobPhase.RUNNING and not step.job.learned.standby


def test_an_island_of_a_hundredth_of_the_others_link_waits_and_both_times_are_said() -> None:
    step = look(500 * MBIT, 500 * MBIT, 0.5 * MBIT, 500 * MBIT)
    assert step.run is not None
    assert (step.job.status.phase, step.run.cause) == (JobPhase.STOPPING, Cause.SHRINK)
    assert step.job.status.reason == "shrinking from 4 to 3 workers: faster without c/0"
    [said] = [event.text for event in step.events if event.kind.startswith("DEVICE")]
    assert said.startswith("c/0 waits as a standby: island c has 0.5 Mbit/s, and all send 0.")
    assert "a step's worth of learning takes 0.265 s" in said
    assert "with it, 0.107 s without it, when all send 20 %" in said


def test_it_leaves_in_place_and_does_not_hand_over_for_40_minutes_what_it_has_not_sent() -> None:
    """Of the run's members without it the next view is, from a step boundary. What it has not sent it takes along, and
    people are told."""
    thin = training(500 * MBIT, 500 * MBIT, 0.5 * MBIT, 500 * MBIT)
    standing = WorkerViewReport(1, ViewStage.TRAINING, 100, takes_in=True)
    nodes = {
        name: replace(one, workers={rank: worker()._replace(view_report=standing) for rank in one.workers})
        for name, one in thin.nodes.items()
    }
    ranks = tuple(range(len(NAMES)))
    begun = ViewRecord(
        job=thin.job.id, run=1, view=1, state=ViewState.IN_FORCE, cause=ViewCause.LAUNCH, reason="", ranks=ranks,
        has_state=ranks, master_address="a.lan", master_port=29500, plan=1, wanted=4, stepped_unix_s=1.0,
    )  # fmt: skip
    step = next_step(changed(thin, nodes=nodes, views=ObservedViews(kept=(begun,), since_s=NOW_S)), clock())
    assert step.job.status.phase is JobPhase.RUNNING
    [view] = step.views
    assert (view.ranks, view.at_boundary, view.keeps_unsent) == ((0, 1, 3), True, True)
    [said] = [event.text for event in step.events if event.kind.startswith("DEVICE")]
    assert "it takes along what it has not sent, which would be on its way for 2400 s" in said


def test_it_does_not_come_back_before_the_run_is_smaller() -> None:
    after = changed(look(500 * MBIT, 500 * MBIT, 0.5 * MBIT, 500 * MBIT).job, phase=JobPhase.RUNNING, run=2)

    def offered(members: tuple[str, ...]) -> JobStep:
        bare = run(*members, number=2)
        islands = replace(bare, members=tuple(replace(one, island=one.node) for one in bare.members))
        nodes = [node(name, {rank: worker()}, work_per_s=1.0, run=2) for rank, name in enumerate(members)]
        known = profile(*(1.0 for _ in members))
        return next_step(observed(after, islands, *nodes, profile=known, free=(free("c", work_per_s=1.0),)), clock())

    assert offered(("a", "b", "d")).job.status.phase is JobPhase.RUNNING
    assert offered(("a", "b")).job.status.phase is JobPhase.STOPPING  # to take it in


@pytest.mark.parametrize("links_bps", [(500, 500, 500, 500), (0.5, 0.5, 0.5, 0.5), (500, 500, 100, 500)])
def test_links_that_are_alike_or_wide_enough_keep_everybody(links_bps: tuple[float, ...]) -> None:
    assert stays(look(*(MBIT * one for one in links_bps)))


def test_nobody_goes_without_a_plan_of_what_links_bear_or_where_fewer_workers_were_not_asked_for() -> None:
    thin = (500 * MBIT, 500 * MBIT, 0.5 * MBIT, 500 * MBIT)
    assert stays(look(*thin, chosen=False))
    four = job(spec=spec(max_workers=4, min_workers=4, strategy="local-steps"))
    assert stays(look(*thin, of=four))
    assert stays(look(*thin, judged_s=NOW_S - 1))  # looked at a second ago


def test_plans_that_follow_each_other_do_not_keep_it_but_steps_are_measured_first() -> None:
    """What links bear is planned anew every few seconds while a link changes."""
    thin = training(500 * MBIT, 500 * MBIT, 0.5 * MBIT, 500 * MBIT, planned_s=NOW_S - 3)
    assert next_step(thin, clock()).job.status.phase is JobPhase.STOPPING
    known = thin.training.profile
    assert known is not None
    assert stays(next_step(changed(thin, profile=replace(known, steps=9)), clock()))


def test_of_two_islands_none_is_left_out_and_one_goes_with_all_its_devices() -> None:
    assert stays(look(500 * MBIT, 0.5 * MBIT, islands=("x", "x", "x", "y")))
    assert stays(look(500 * MBIT, 30 * MBIT, 500 * MBIT, islands=("x", "y", "y", "z")))  # they are half of the run
    step = look(500 * MBIT, 0.5 * MBIT, 500 * MBIT, islands=("x", "y", "y", "z"))
    assert step.job.status.reason == "shrinking from 4 to 2 workers: faster without b/0, c/0"


def test_a_link_that_was_not_measured_keeps_everybody() -> None:
    seen = training(500 * MBIT, 500 * MBIT, 0.5 * MBIT, 500 * MBIT)
    known = seen.training.profile
    assert known is not None
    unknown = replace(known, links={name: one for name, one in known.links.items() if name != "d"})
    assert stays(next_step(changed(seen, profile=unknown), clock()))
    assert stays(next_step(changed(seen, profile=replace(known, paths={})), clock()))
    alone = {path: bps for path, bps in known.paths.items() if "d" not in path}  # as where it sent nothing yet
    assert stays(next_step(changed(seen, profile=replace(known, paths=alone)), clock()))
