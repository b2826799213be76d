"""Runs that take devices in, leave them waiting and send them back. Devices of speed v take 20/v + b/v ms for b samples
and measure work v."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made import (
    NOW_S,
    changed,
    clock,
    free,
    job,
    node,
    observed,
    profile,
    run,
    spec,
    worker,
)

from atoll.controller.estimators.profile import NoiseEstimate, Profile
from atoll.controller.jobs.admission.growing import (
    KEPT_STANDBYS,
    RESTART_S,
    assess_devices,
    learned,
    restart_s,
    stood_by,
)
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import JobStep, ObservedJob
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import Cause, Growth, JobPhase, JobRecord, PhaseChange, Standby

NAMES = ("a", "b", "c", "d", "e", "f")


def running(known: Profile | None, *offers: FreeDevice, of: JobRecord | None = None, **fields: Any) -> ObservedJob:
    """A run whose ranks measured what `known` says, for 20 s, with devices that have been free for long."""
    ranks = len(known.ranks) if known else 3
    works = fields.pop("works", (1.0,) * ranks)
    nodes = [node(NAMES[i], {i: worker()}, work_per_s=works[i], run=fields.get("number", 1)) for i in range(ranks)]
    number = fields.pop("number", 1)
    record = of or job(run=number, spec=spec(max_workers=8))
    return observed(record, run(*NAMES[:ranks], number=number), *nodes, free=offers, profile=known, **fields)


def look(view: ObservedJob) -> JobStep:
    return next_step(view, clock())


def texts(step: JobStep) -> list[str]:
    return [event.text for event in step.events if event.kind.startswith("DEVICE")]


def test_a_fast_device_is_taken_in_and_the_event_says_what_it_promises() -> None:
    step = look(running(profile(1, 1, 1), free("x", work_per_s=0.5)))
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.run is not None
    assert (step.run.cause, step.run.grace_s) == (Cause.GROW, 10.0)
    assert step.job.status.reason == "growing from 3 to 4 workers: devices are free on x"
    [text] = texts(step)
    assert text.startswith("x/0 is admitted: the run takes")
    assert step.job.learned.growth is not None
    assert step.job.learned.growth.added == ("x/0",)
    assert step.job.learned.growth.samples_per_s == pytest.approx(240 / 0.1)


def test_a_slow_device_waits_and_is_told_once() -> None:
    """1. It is judged at once. 2. The same verdict with other numbers is neither told nor written again."""
    offer = free("x", work_per_s=0.04)
    step = look(running(profile(1, 1, 1), offer))
    assert step.job.status.phase is JobPhase.RUNNING
    assert step.judged
    assert step.job.learned.standby["x/0"].reason.startswith("the run would take")
    [text] = texts(step)
    assert text.startswith("x/0 waits as a standby: the run would take")
    again = look(running(profile(1, 1, 0.9), offer, of=step.job))
    assert again.judged
    assert (again.job, again.events) == (step.job, ())


def test_what_was_decided_about_devices_is_recorded_with_its_input_where_it_is_news() -> None:
    """1. A slow device is left waiting, a fast one taken in: one record of both. 2. The planner says the same of its
    input, byte for byte. 3. The same verdict again is no news."""
    slow, fast = free("x", work_per_s=0.04), free("y", work_per_s=0.5)
    step = look(running(profile(1, 1, 1), slow, fast))
    (admission,) = step.decisions
    assert (admission.id, admission.run, step.job.status.admissions) == (1, 1, 1)
    assert admission.reason == "y/0 is admitted; x/0 waits"
    assert PLANNERS["admission"].run_json(admission.input) == admission.output
    waits = look(running(profile(1, 1, 1), slow))
    assert waits.decisions[0].reason == "x/0 waits"
    again = look(running(profile(1, 1, 1), slow, of=waits.job))
    assert (again.judged, again.decisions, again.job.status.admissions) == (True, (), 1)


def test_a_standby_is_looked_at_again_after_ten_seconds_and_a_new_device_at_once() -> None:
    waiting = job(spec=spec(max_workers=8), standby={"x/0": Standby(reason="it was slow", work_per_s=0.5)})
    view = running(profile(1, 1, 1), free("x", work_per_s=0.5), of=waiting, judged_s=NOW_S - 9)
    assert look(view).job.status.phase is JobPhase.RUNNING
    assert look(changed(view, judged_s=NOW_S - 10)).job.status.phase is JobPhase.STOPPING
    new = changed(view, free=(*view.devices.free, free("y", work_per_s=1.0)))
    step = look(new)
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.job.status.reason == "growing from 3 to 5 workers: devices are free on x, y"
    assert step.job.learned.standby == {}


def test_devices_of_unknown_speed_are_taken_in_at_once_as_only_training_can_show_it() -> None:
    for view in (running(None, free("x")), running(None, free("x", work_per_s=1.0), works=(0.0,) * 3)):
        step = look(view)
        assert step.job.status.phase is JobPhase.STOPPING
        assert texts(step) == [
            "x/0 is admitted: how fast it is for this job is not known, so the run will show it",
        ]


def test_a_device_that_can_be_predicted_waits_for_the_first_measurements_but_not_for_ever() -> None:
    early = running(None, free("x", work_per_s=1.0), since_s=NOW_S - 10)
    assert look(early).job.status.phase is JobPhase.RUNNING
    assert look(changed(early, since_s=NOW_S - 16)).job.status.phase is JobPhase.STOPPING


def test_a_pipeline_that_can_be_whole_again_waits_for_no_measurements() -> None:
    """1. Two pipelines of two stages; one is lost, and its devices are free: of pipelines nothing is predicted, however
    well its devices are known. 2. One device alone makes up none."""
    of = job(run=1, spec=spec(max_workers=4, strategy="groups", strategy_settings={"stages": 2}))
    offers = free("x", work_per_s=1.0), free("y", work_per_s=0.01)
    view = running(profile(1, 1), *offers, of=of, since_s=NOW_S - 4)
    for each in (view, changed(view, profile=None)):
        assert look(each).job.status.reason == "growing from 2 to 4 workers: devices are free on x, y"
        assert look(changed(each, free=offers[:1])).job.status.phase is JobPhase.RUNNING


def test_a_device_that_the_run_had_is_taken_back_after_a_second_and_another_after_three() -> None:
    began = running(profile(1, 1, 1))  # on a, b and c; c is lost, and its device free again
    for name, waits_s in (("x", 3.0), ("c", 1.0)):
        for free_s, cause in ((waits_s - 0.1, None), (waits_s, Cause.GROW)):
            offer = free(name, since_s=NOW_S - free_s, work_per_s=1.0)
            view = changed(began, free=(offer,), profile=profile(1, 1))
            assert assess_devices(view, run("a", "b"), clock()).cause is cause


def test_a_new_plan_that_is_not_measured_yet_lets_nobody_in() -> None:
    """1. A device waits by a verdict, another has just come. 2. A new plan holds; the ranks have few steps under it, or
    one of them has none. 3. Both wait, however long the run has trained, unless a rank stays silent for long."""
    known = profile(1, 1, 1, plan=2)
    waiting = job(spec=spec(max_workers=8), standby={"x/0": Standby(reason="it was slow", work_per_s=0.5)})
    view = running(known, free("x", work_per_s=0.5), free("y", work_per_s=1.0), of=waiting, planned_s=NOW_S - 2)
    view = changed(view, issued=(*view.plans.issued, replace(view.plans.issued[0], id=2)), since_s=NOW_S - 1000)
    early = changed(view, profile=replace(known, steps=9))
    silent = changed(view, profile=replace(known, ranks={0: known.ranks[0]}))
    for unmeasured in (early, silent, changed(view, profile=replace(known, plan=1))):
        assert look(unmeasured).job == waiting
    assert look(view).job.status.phase is JobPhase.STOPPING
    assert look(changed(early, planned_s=NOW_S - 100)).job == waiting
    step = look(changed(silent, planned_s=NOW_S - 16))
    assert step.job.status.reason == "growing from 3 to 4 workers: devices are free on y"


def test_no_more_devices_are_taken_in_than_the_job_asked_for_and_the_best_come_first() -> None:
    wants_two_more = job(spec=spec(max_workers=5))
    offers = [free("x", work_per_s=0.5), free("y", work_per_s=1.0), free("z", work_per_s=2.0)]
    step = look(running(profile(1, 1, 1), *offers, of=wants_two_more))
    assert step.job.learned.growth is not None
    assert step.job.learned.growth.added == ("z/0", "y/0")
    full = look(running(profile(1, 1, 1), *offers, of=job(spec=spec(max_workers=3))))
    assert (full.job.status.phase, full.job.learned.standby, full.events) == (JobPhase.RUNNING, {}, ())


def test_what_was_learned_of_a_device_holds_as_long_as_it_measures_the_same() -> None:
    record = job(speeds={"x/0": 0.02, "y/0": 0.02, "z/0": 0.02}, learned_at={"x/0": 1.0, "y/0": 0.05})
    devices = [free("x", work_per_s=1.2), free("y", work_per_s=1.0), free("z", work_per_s=1.0), free("w")]
    assert learned(record, devices) == {"x/0": 0.02, "z/0": 0.02}


def grown(known: Profile, before: float, added: tuple[str, ...] = ("d/0",), **fields: Any) -> ObservedJob:
    """Run 2, which took devices in; run 1 trained `before` samples a second."""
    growth = Growth(
        run=1, added=added, workers=len(known.ranks) - len(added), samples_per_s=before, total_batch=240, error=0.01
    )
    record = job(run=2, spec=spec(max_workers=8), growth=growth)
    return running(known, of=record, number=2, judged_s=NOW_S, **fields)


def test_a_run_that_is_slower_with_what_it_took_in_sends_it_back() -> None:
    """1. 2400 samples a second without d. 2. With d a step takes 0.5 s: 480. 3. d waits; it is not tried again in a run
    of three, unless it measures otherwise or the run becomes smaller."""
    slow = profile(1, 1, 1, 0.2, step_s=0.5)
    step = look(grown(slow, before=2400.0))
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.run is not None
    assert step.run.cause is Cause.SHRINK
    assert step.job.status.reason == "shrinking from 4 to 3 workers: faster without d/0"
    assert texts(step) == ["d/0 waits as a standby: the run was slower with it: 2400 → 480 samples/s measured"]
    assert step.job.learned.standby["d/0"] == Standby(
        reason="the run was slower with it: 2400 → 480 samples/s measured", work_per_s=1.0, slowed=3
    )
    assert step.job.learned.growth is None

    after = changed(step.job, phase=JobPhase.RUNNING, run=3)
    back = free("d", work_per_s=1.0)
    three = running(profile(1, 1, 1), back, of=after, number=3)
    assert look(three).job.status.phase is JobPhase.RUNNING
    moved = changed(three, free=(free("d", work_per_s=2.0),))
    assert look(moved).job.status.phase is JobPhase.STOPPING
    assert look(running(profile(1, 1), back, of=after, number=3)).job.status.phase is JobPhase.STOPPING


def test_a_run_that_gained_keeps_what_it_took_in_and_says_so() -> None:
    step = look(grown(profile(1, 1, 1, 0.5), before=2400.0))
    assert step.job.status.phase is JobPhase.RUNNING
    assert step.job.learned.growth is None
    [text] = texts(step)
    assert text.startswith("grown from 3 to 4 workers: 2400 → ")


def test_a_run_is_compared_only_once_it_is_steady_under_its_newest_plan() -> None:
    slow = profile(1, 1, 1, 1, step_s=0.5)
    assert look(grown(slow, before=2400.0)).job.status.phase is JobPhase.STOPPING
    unsteady = (
        grown(slow, before=2400.0, planned_s=NOW_S - 9),
        grown(slow, before=2400.0, since_s=NOW_S - 9),
        grown(replace(slow, steps=9), before=2400.0),
        grown(replace(slow, plan=0), before=2400.0),
    )
    for view in unsteady:
        step = look(view)
        assert (step.job, step.events) == (view.job, ())


def test_a_device_that_comes_while_the_last_ones_are_on_trial_waits_a_minute_and_shares_their_trial() -> None:
    trial = grown(profile(1, 1, 1), before=2000.0, added=("c/0",), planned_s=NOW_S - 5)
    trial = changed(trial, free=(free("x", work_per_s=1.0),), judged_s=NOW_S - 11)
    assert look(trial).job == trial.job
    step = look(replace(trial, since_s=NOW_S - 61))
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.job.learned.growth is not None
    assert (step.job.learned.growth.run, step.job.learned.growth.added) == (2, ("c/0", "x/0"))
    assert (step.job.learned.growth.samples_per_s, step.job.learned.growth.workers) == (2000.0, 2)


def test_a_run_that_lost_others_meanwhile_is_not_compared() -> None:
    view = grown(profile(1, 1, 1, step_s=0.5), before=2400.0, added=("c/0",))
    assert view.job.learned.growth is not None
    fewer = changed(view, job=changed(view.job, growth=replace(view.job.learned.growth, workers=3)))
    step = look(fewer)
    assert (step.job.status.phase, step.job.learned.growth, step.events) == (JobPhase.RUNNING, None, ())


def test_of_several_that_were_taken_in_the_slower_half_goes_first() -> None:
    step = look(grown(profile(1, 1, 0.9, 0.3, 0.1, step_s=0.5), before=2400.0, added=("c/0", "d/0", "e/0")))
    assert sorted(step.job.learned.standby) == ["d/0", "e/0"]
    assert step.job.learned.growth is not None
    assert (step.job.learned.growth.run, step.job.learned.growth.added) == (2, ("c/0",))


def test_a_job_that_asked_for_so_many_workers_keeps_a_slow_one_and_warns() -> None:
    view = grown(profile(1, 1, 1, 0.2, step_s=0.5), before=2400.0)
    four = changed(view, job=replace(view.job, spec=spec(min_workers=4, max_workers=8)))
    step = look(four)
    assert (step.job.status.phase, step.job.learned.growth) == (JobPhase.RUNNING, None)
    assert texts(step) == ["slower with d/0 (2400 → 480 samples/s), but fewer workers were not asked for"]


def test_samples_of_a_larger_batch_are_worth_less_when_runs_are_compared() -> None:
    """20 % more samples a second in batches of ten times the size, where the noise is that of the first: slower."""
    noise = NoiseEstimate(noise_scale=240.0, error=0.1, low=240.0, high=240.0, steps=50)
    larger = profile(1, 1, 1, 1, total_batch=2400, step_s=2400 / 2880, noise=noise)
    assert look(grown(larger, before=2400.0)).job.status.phase is JobPhase.STOPPING
    assert look(grown(replace(larger, noise=None), before=2400.0)).job.status.phase is JobPhase.RUNNING


def test_a_worker_that_holds_every_step_up_is_sent_away_though_it_was_there_from_the_start() -> None:
    view = running(profile(1, 1, 1, 0.02))
    step = look(view)
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.job.status.reason == "shrinking from 4 to 3 workers: faster without d/0"
    assert step.job.learned.standby["d/0"].slowed == 3
    (admission,) = step.decisions
    assert admission.reason == "faster without d/0"
    assert PLANNERS["admission"].run_json(admission.input) == admission.output
    needed = changed(view, job=replace(view.job, spec=spec(min_workers=4, max_workers=8)))
    assert look(needed).job.status.phase is JobPhase.RUNNING


def test_the_next_run_leaves_the_standby_out_and_the_rest_trains_on() -> None:
    queued = job(JobPhase.QUEUED, standby={"d/0": Standby(reason="slow", slowed=1)}, total_batch=240)
    devices = [free("a"), free("b"), free("d")]
    step = next_step(observed(queued, run("a", "d"), node("a"), node("b"), node("d"), free=devices), clock())
    assert step.run is not None
    assert [m.node for m in step.run.members] == ["a", "b"]
    assert step.job.learned.standby == queued.learned.standby
    assert texts(step) == []
    alone = next_step(observed(queued, run("a", "d"), node("d"), free=[free("d")]), clock())
    assert alone.run is not None
    assert alone.run.members[0].node == "d"
    assert alone.job.learned.standby == {}


def test_a_start_tells_whom_it_leaves_waiting() -> None:
    devices = [free("a", work_per_s=1.0), free("b", work_per_s=0.05)]
    step = next_step(observed(job(JobPhase.QUEUED, run=0), None, node("a"), node("b"), free=devices), clock())
    assert step.run is not None
    assert len(step.run.members) == 1
    assert texts(step) == [
        "b/0 waits as a standby: 20 times slower than the fastest device, and no step was measured yet"
    ]


def test_a_restart_costs_what_the_last_one_cost_without_the_time_in_the_queue() -> None:
    def change(before: JobPhase, after: JobPhase, unix_s: float) -> PhaseChange:
        return PhaseChange(before=before, after=after, cause="", unix_s=unix_s)

    history = (
        change(JobPhase.QUEUED, JobPhase.STARTING, 100.0),
        change(JobPhase.STARTING, JobPhase.RUNNING, 104.0),
        change(JobPhase.RUNNING, JobPhase.STOPPING, 200.0),
        change(JobPhase.STOPPING, JobPhase.QUEUED, 202.0),
        change(JobPhase.QUEUED, JobPhase.STARTING, 290.0),
        change(JobPhase.STARTING, JobPhase.RUNNING, 293.5),
    )
    assert restart_s(history) == pytest.approx(5.5)
    assert restart_s(history[:3]) == RESTART_S
    assert restart_s(()) == RESTART_S


def test_only_so_many_standbys_are_kept_and_those_that_are_there_first() -> None:
    old = {f"old{i:03}/0": Standby(reason="slow") for i in range(KEPT_STANDBYS)}
    record, events = stood_by(job(standby=old), {"new/0": Standby(reason="slow")}, ("old063/0",))
    assert len(record.learned.standby) == KEPT_STANDBYS
    assert {"new/0", "old063/0"} <= set(record.learned.standby)
    assert len(events) == 1
