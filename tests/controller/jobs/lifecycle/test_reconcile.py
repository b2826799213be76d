"""One look at one job: what is seen goes in, records, events and actions come out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import (
    JOB,
    NOW_S,
    changed,
    clock,
    ended,
    exited,
    free,
    job,
    node,
    observed,
    run,
    spec,
    worker,
)

from atoll.agent.controller_stream import BACKOFF_CAP_S, REGISTER_DEADLINE_S
from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.estimators.profile import LinkEstimate, Profile
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import (
    RETURN_GRACE_S,
    ForgetWorker,
    JobStep,
    LaunchWorkers,
    SendPlan,
    StopRun,
    WorkerPhase,
)
from atoll.controller.jobs.model.policy import policy_of, with_learned
from atoll.controller.jobs.records.ledger import Ledger
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import Cause, JobPhase, JobPins, JobRecord, RunFailure, WorkerExitKind
from atoll.controller.state.store import Fence, Put
from atoll.jobs.job_spec import Adapt, Rule
from atoll.jobs.worker_key import WorkerKey
from atoll.step_estimators.estimates import RankProfile

FINISHED = exited(WorkerExitKind.FINISHED, step=9)
KILLED = exited(WorkerExitKind.SIGNALLED, -9, "killed by signal 9", step=9)


def key(rank: int, run: int = 1) -> WorkerKey:
    return WorkerKey(JOB, run, rank)


# QUEUED


def test_a_queued_job_starts_on_free_devices_with_the_next_run_number() -> None:
    queued = job(JobPhase.QUEUED, run=4)
    step = next_step(observed(queued, run("a", number=4), node("a"), node("b"), free=[free("b"), free("a")]), clock())
    assert (step.job.status.phase, step.job.status.run) == (JobPhase.STARTING, 5)
    assert step.run is not None
    assert step.plan is not None
    assert [m.node for m in step.run.members] == ["a", "b"]
    assert (step.run.run, step.run.master_address, step.run.master_port) == (5, "a.lan", 29500)
    assert (step.plan.run, step.plan.id, step.plan.shares) == (5, 1, (1.0, 1.0))
    assert step.actions == ()  # launches follow once this is written
    assert [e.text for e in step.events] == [
        "run 5: starting 2 workers on 2 nodes (a/0, b/0)",
        "plan 1 (even): equal batches for all 2 workers",
        "placement: state is copied between a + b",
    ]


def test_a_run_over_thin_links_begins_with_islands_a_secret_and_the_sparsity_last_asked_for() -> None:
    sparse = spec(strategy="stale-sparse", strategy_settings={"sparsity": 0.98})
    look = {"free": [free("a"), free("b")], "data_seed": "5e" * 32}
    for asked, sparsity in ((None, 0.98), (0.0, 0.0), (0.995, 0.995)):
        pinned = {} if asked is None else {"sparsity": asked}
        queued = job(JobPhase.QUEUED, run=0, spec=sparse, pinned=JobPins(strategy_params=pinned))
        step = next_step(observed(queued, None, node("a"), node("b"), **look), clock())
        assert step.run is not None
        assert step.plan is not None
        assert (step.plan.strategy_params, step.run.data_seed) == ({"sparsity": sparsity}, "5e" * 32)
        assert {member.island for member in step.run.members} == {"here"}
        assert "5e5e" not in repr(step)
    dense = next_step(observed(job(JobPhase.QUEUED, run=0), None, node("a"), node("b"), free=look["free"]), clock())
    assert dense.plan is not None
    assert dense.plan.strategy_params == {}


def test_a_queued_job_says_what_it_waits_for_once() -> None:
    queued = job(JobPhase.QUEUED, run=0)
    step = next_step(observed(queued, None), clock())
    assert step.job.status.reason == "waiting for devices: 0 free, at least 1 needed"
    assert next_step(observed(step.job, None), clock()).job is step.job


def test_the_first_plan_knows_what_earlier_runs_learned() -> None:
    queued = job(JobPhase.QUEUED, run=1, speeds={"a/0": 0.001, "b/0": 0.003}, total_batch=400)
    step = next_step(observed(queued, run("a", "b"), node("a"), node("b"), free=[free("a"), free("b")]), clock())
    assert step.plan is not None
    assert (step.plan.planner, step.plan.shares) == ("inverse-time", (300.0, 100.0))
    assert step.plan.reason == "speeds learned in earlier runs: 1.00 : 0.33"


def test_the_first_plan_is_even_while_nobody_knows_what_memory_holds() -> None:
    devices = [free("a"), free("b", speed=0.5)]
    step = next_step(observed(job(JobPhase.QUEUED, run=0), None, node("a"), node("b"), free=devices), clock())
    assert step.plan is not None
    assert (step.plan.planner, step.plan.shares) == ("even", (1.0, 1.0))


def test_a_job_that_wants_even_batches_gets_them_whatever_is_known() -> None:
    queued = job(JobPhase.QUEUED, run=1, spec=spec(split="even"), speeds={"a/0": 0.001, "b/0": 0.003})
    step = next_step(observed(queued, run("a", "b"), node("a"), node("b"), free=[free("a"), free("b")]), clock())
    assert step.plan is not None
    assert step.plan.planner == "even"


def test_a_queued_job_is_cancelled_at_once() -> None:
    step = next_step(observed(job(JobPhase.QUEUED, run=0, cancel=True), None, free=[free("a"), free("b")]), clock())
    assert step.job.status.phase is JobPhase.CANCELLED


# STARTING


def test_missing_workers_are_launched_until_they_are_there() -> None:
    starting = observed(job(JobPhase.STARTING), run("a", "b"), node("a", {0: worker(WorkerPhase.STARTING)}), node("b"))
    assert next_step(starting, clock()).actions == (LaunchWorkers("b", JOB, 1, (1,)),)


def test_a_run_runs_when_all_its_workers_do() -> None:
    one = observed(
        job(JobPhase.STARTING), run("a", "b"), node("a", {0: worker()}), node("b", {1: worker(WorkerPhase.STARTING)})
    )
    assert next_step(one, clock()).job.status.phase is JobPhase.STARTING
    both = observed(job(JobPhase.STARTING), run("a", "b"), node("a", {0: worker()}), node("b", {1: worker()}))
    assert next_step(both, clock()).job.status.phase is JobPhase.RUNNING


def test_a_worker_that_finished_before_it_was_seen_running_is_fine() -> None:
    quick = observed(
        job(JobPhase.STARTING), run("a", "b"), node("a", {0: worker(exit=FINISHED)}), node("b", {1: worker()})
    )
    step = next_step(quick, clock())
    assert step.job.status.phase is JobPhase.RUNNING
    assert step.run is not None
    assert step.run.members[0].exit == FINISHED


def test_a_worker_that_cannot_start_stops_the_run() -> None:
    broken = worker(exit=exited(WorkerExitKind.NOT_STARTED, reason="no such interpreter"))
    step = next_step(
        observed(job(JobPhase.STARTING), run("a", "b"), node("a", {0: worker()}), node("b", {1: broken})), clock()
    )
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.job.status.reason == "rank 1 on b could not start: no such interpreter"
    assert step.run is not None
    assert (step.run.fenced, step.run.cause) == (True, Cause.LOSS)


def test_a_start_has_a_deadline() -> None:
    slow = observed(job(JobPhase.STARTING), run("a", "b"), node("a", {0: worker()}), node("b"), since_s=NOW_S - 61)
    step = next_step(slow, clock())
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.job.status.reason.startswith("rank 1 on b did not start within 60 s")
    late = RunFailure(kind=WorkerExitKind.STOPPED, step=0, code=0, reason="did not start within 60 s")
    again = changed(slow, job=changed(slow.job, last_failure=late))
    assert next_step(again, clock()).job.status.phase is JobPhase.STARTING, "the second start may take 120 s"


# RUNNING


def test_a_run_that_is_well_needs_nothing() -> None:
    record = job()
    step = next_step(observed(record, run("a", "b"), node("a", {0: worker()}), node("b", {1: worker()})), clock())
    assert (step.job, step.plan, step.events, step.actions) == (record, None, (), ())


def test_a_run_that_trained_well_for_long_gives_the_restarts_back() -> None:
    """1. The script failed in step 40 and its second restart is used up. 2. The next run gets past step 40 and trains
    for ten minutes. 3. The job has all its restarts again, and says so once."""
    failed = RunFailure(kind=WorkerExitKind.FAILED, step=40, code=1, reason="ValueError")
    tried = job(spec=spec(max_restarts=2), restarts=2, last_failure=failed)
    nodes = [node("a", {0: worker()}), node("b", {1: worker()})]

    def look(trained_s: float, newest_step: int, of: JobRecord = tried) -> JobStep:
        return next_step(
            observed(of, run("a", "b"), *nodes, since_s=NOW_S - trained_s, newest_step=newest_step), clock()
        )

    assert look(599, 5000).job.status.restarts == 2
    assert look(3600, 40).job.status.restarts == 2  # it has not got past what failed
    for newest_step in (41, 0):  # a plain script tells no steps
        step = look(600, newest_step)
        assert (step.job.status.restarts, step.job.status.last_failure, step.run) == (0, failed, run("a", "b"))
        assert [e.text for e in step.events] == ["trained for 10 minutes without a failure: its 2 restarts are back"]
    assert look(600, 41, changed(tried, restarts=0)).events == ()
    lost = RunFailure(kind=WorkerExitKind.LOST, step=0, code=0, reason="node b is silent for 3 s", times=7)
    step = look(600, 0, job(last_failure=lost))
    assert step.job.status.last_failure == replace(lost, times=1)
    assert [e.text for e in step.events] == ["trained for 10 minutes without a failure: its losses count anew"]


def test_all_ranks_finished_is_done() -> None:
    exits = node("a", {0: worker(exit=FINISHED)}), node("b", {1: worker(exit=FINISHED)})
    step = next_step(observed(job(), run("a", "b"), *exits, checkpoint_step=9), clock())
    assert (step.job.status.phase, step.job.status.checkpoint_step) == (JobPhase.DONE, 9)
    assert step.run is not None
    assert all(m.exit is not None for m in step.run.members)


def test_a_killed_worker_fences_the_run_first() -> None:
    step = next_step(
        observed(job(), run("a", "b"), node("a", {0: worker()}), node("b", {1: worker(exit=KILLED)})), clock()
    )
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.run is not None
    assert (step.run.fenced, step.run.grace_s) == (True, 3.0)
    assert step.actions == ()
    assert [e.text for e in step.events] == [
        "run 1: rank 1 on b was killed at step 9: killed by signal 9",
        "stopping: rank 1 on b was killed at step 9: killed by signal 9",
    ]


def test_recorded_ends_may_be_forgotten_and_unrecorded_ones_not() -> None:
    recorded = ended(run("a", "b"), FINISHED, None)
    nodes = node("a", {0: worker(exit=FINISHED)}), node("b", {1: worker(exit=FINISHED)})
    step = next_step(observed(job(), recorded, *nodes), clock())
    assert step.actions == (ForgetWorker("a", key(0)),)


def test_an_agent_that_was_restarted_has_lost_its_worker() -> None:
    step = next_step(observed(job(), run("a", "b"), node("a", {0: worker()}), node("b")), clock())
    assert step.job.status.phase is JobPhase.STOPPING
    assert "the agent of b was restarted" in step.job.status.reason


def test_a_node_counts_as_lost_when_its_lease_ran_out_and_not_before() -> None:
    def at(silent_s: float) -> JobPhase:
        gone = node("b", connected=False, last_message_s=NOW_S - silent_s)
        return next_step(observed(job(), run("a", "b"), node("a", {0: worker()}), gone), clock()).job.status.phase

    assert (at(2.9), at(3.1)) == (JobPhase.RUNNING, JobPhase.STOPPING)


def test_a_new_leader_gives_agents_time_to_come_back() -> None:
    """Also those that waited for an answer of a leader before that stood still, and then paused."""
    assert RETURN_GRACE_S > REGISTER_DEADLINE_S + BACKOFF_CAP_S

    def after(leading_s: float) -> JobPhase:
        unheard = node("b", connected=False, last_message_s=None)
        view = observed(job(), run("a", "b"), node("a", {0: worker()}), unheard)
        return next_step(view, clock(awaiting_since_s=NOW_S - leading_s)).job.status.phase

    assert (after(RETURN_GRACE_S - 1), after(RETURN_GRACE_S + 0.5)) == (JobPhase.RUNNING, JobPhase.STOPPING)


def test_a_node_that_nobody_knows_any_more_is_lost_after_that_time_too() -> None:
    view = observed(job(), run("a", "b"), node("a", {0: worker()}))
    assert next_step(view, clock(awaiting_since_s=NOW_S - RETURN_GRACE_S + 1)).job.status.phase is JobPhase.RUNNING
    assert next_step(view, clock(awaiting_since_s=NOW_S - RETURN_GRACE_S - 1)).job.status.phase is JobPhase.STOPPING


def test_a_rank_that_finishes_long_before_the_others_left_early() -> None:
    nodes = node("a", {0: worker(exit=FINISHED)}), node("b", {1: worker()})
    recorded = ended(run("a", "b"), FINISHED, None)
    early = observed(job(), recorded, *nodes, finished_since_s=NOW_S - 9)
    assert next_step(early, clock()).job.status.phase is JobPhase.RUNNING
    step = next_step(changed(early, finished_since_s=NOW_S - 11), clock())
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.job.status.reason.startswith("rank 0 left early with exit code 0 while others were training")


def test_who_has_trained_may_take_its_time_to_end_and_takes_no_devices_in() -> None:
    """1. Rank 0 evaluates long after rank 1 has ended: it once was stopped after 10 s, rank 1 was blamed. 2. Devices
    become free: there is no step left for them. 3. A rank that has not trained is still left behind by one that has."""
    finished = node("b", {1: worker(exit=FINISHED)})
    recorded = ended(run("a", "b"), None, FINISHED)
    long_ago = {"finished_since_s": NOW_S - 3600}
    evaluates = observed(job(), recorded, node("a", {0: worker(trained=True)}), finished, **long_ago)
    assert next_step(evaluates, clock()).job.status.phase is JobPhase.RUNNING
    saves = observed(job(), run("a"), node("a", {0: worker(trained=True)}), free=[free("c", 0.0)])
    assert next_step(saves, clock()).job.status.phase is JobPhase.RUNNING
    trains = observed(job(), recorded, node("a", {0: worker()}), finished, **long_ago)
    assert next_step(trains, clock()).job.status.phase is JobPhase.STOPPING


def test_the_ranks_of_a_plain_script_may_end_when_they_like() -> None:
    nodes = node("a", {0: worker(exit=FINISHED)}), node("b", {1: worker(uses_atoll=False)})
    view = observed(job(), ended(run("a", "b"), FINISHED, None), *nodes, finished_since_s=NOW_S - 600)
    assert next_step(view, clock()).job.status.phase is JobPhase.RUNNING


def test_free_devices_make_a_run_grow_when_they_are_there_to_stay() -> None:
    def with_device(free_since_s: float, running_since_s: float = 0.0) -> JobPhase:
        view = observed(
            job(), run("a"), node("a", {0: worker()}), free=[free("b", free_since_s)], since_s=running_since_s
        )
        return next_step(view, clock()).job.status.phase

    assert with_device(NOW_S - 2) is JobPhase.RUNNING
    assert with_device(NOW_S - 4) is JobPhase.STOPPING
    assert with_device(NOW_S - 4, running_since_s=NOW_S - 1) is JobPhase.RUNNING
    plain = observed(job(), run("a"), node("a", {0: worker(uses_atoll=False)}), free=[free("b", 0.0)])
    assert next_step(plain, clock()).job.status.phase is JobPhase.RUNNING
    other_kind = observed(job(), run("a"), node("a", {0: worker()}), free=[free("b", 0.0, kind="cuda")])
    assert next_step(other_kind, clock()).job.status.phase is JobPhase.RUNNING
    full = observed(job(spec=spec(max_workers=1)), run("a"), node("a", {0: worker()}), free=[free("b", 0.0)])
    assert next_step(full, clock()).job.status.phase is JobPhase.RUNNING


def test_growing_gives_time_to_reach_a_step_boundary() -> None:
    step = next_step(observed(job(), run("a"), node("a", {0: worker()}), free=[free("b", 0.0)]), clock())
    assert step.run is not None
    assert (step.run.cause, step.run.grace_s) == (Cause.GROW, 10.0)
    assert step.job.status.reason == "growing from 1 to 2 workers: devices are free on b"


def test_a_job_says_itself_how_long_its_workers_get_to_reach_a_step_boundary() -> None:
    """After a loss there is none to reach, so that grace stays."""
    patient = spec(stop_grace_s=45.0)
    grows = observed(job(spec=patient), run("a"), node("a", {0: worker()}), free=[free("b", 0.0)])
    cancelled = observed(job(spec=patient, cancel=True), run("a"), node("a", {0: worker()}))
    lost = observed(job(spec=patient), run("a"), node("a", {0: worker(exit=KILLED)}))
    found = [next_step(view, clock()).run for view in (grows, cancelled, lost)]
    assert [run.grace_s for run in found if run is not None] == [45.0, 45.0, 3.0]
    growing = job(JobPhase.STOPPING, spec=patient, cancel=True)
    stopping = observed(growing, run("a", cause=Cause.GROW, grace_s=45.0), node("a", {0: worker()}))
    assert [a.grace_s for a in next_step(stopping, clock()).actions if isinstance(a, StopRun)] == [45.0]


def test_a_script_without_atoll_gets_as_long_to_end_as_from_torchrun() -> None:
    """It had 4 s from SIGTERM to SIGKILL on a cancel."""
    found = [
        next_step(observed(job(cancel=True), run("a"), node("a", {0: worker(uses_atoll=uses)})), clock()).run
        for uses in (False, True)
    ]
    assert [one.grace_s for one in found if one is not None] == [28.0, 2.0]


def test_unequal_devices_get_a_new_plan_and_what_was_learned_is_kept() -> None:
    nodes = node("a", {0: worker()}), node("b", {1: worker()})
    ranks = {
        rank: RankProfile(plan=1, local_batch=100, compute_s=compute_s, compute_error_s=0.0, steps=20)
        for rank, compute_s in enumerate((0.1, 0.3))
    }
    profile = Profile(plan=1, total_batch=200, entries=0, step_s=0.3, steps=20, newest_step=40, ranks=ranks)
    step = next_step(
        observed(job(), run("a", "b"), *nodes, profile=profile, profile_is_news=True, total_batch=200, batch_size=256),
        clock(),
    )
    assert step.plan is not None
    assert (step.plan.id, step.plan.from_step, step.plan.shares) == (2, 45, (150.0, 50.0))
    assert step.job.learned.speeds == {"a/0": 0.001, "b/0": 0.003}
    assert (step.job.learned.total_batch, step.job.learned.initial_batch) == (200, 256)


@pytest.mark.parametrize(
    ("asked", "optimizer", "rule"),
    [
        ("auto", "adaptive", "square-root"),
        ("auto", "sgd", "adascale"),
        ("auto", "", "adascale"),  # a worker of an earlier version, which says nothing
        ("adascale", "adaptive", "adascale"),
        ("none", "sgd", "none"),
    ],
)
def test_the_learning_rate_follows_the_optimizer_unless_the_user_says_how(
    asked: Rule, optimizer: str, rule: str
) -> None:
    """What workers say of optimizer and accumulation is kept for later runs, whose first plans know nothing else."""
    told = observed(job(), run("a"), node("a", {0: worker()}), optimizer=optimizer, batches_per_update=4)
    learned = with_learned(told, replace(told.job, spec=spec(adapt=Adapt(learning_rate=asked))))
    policy = policy_of(learned, "dense")
    assert (policy.rule, policy.batches_per_update) == (rule, 4)
    silent = observed(learned, run("a"), node("a", {0: worker()}))
    assert policy_of(with_learned(silent, learned), "dense") == policy
    assert Adapt().learning_rate == "auto"


def test_a_planner_that_finds_no_plan_says_so_once_and_holds_nothing_up() -> None:
    """1. Links carry not even the largest sparsity within a step: an event gives the planner's reason, and all else
    that the job needs is done. 2. Under the same plan it is not said again."""
    asked = job(spec=spec(strategy="stale-sparse", adapt=Adapt(strategy_params=("sparsity",))))
    ranks = {
        rank: RankProfile(plan=1, local_batch=100, compute_s=0.001, compute_error_s=0.0, steps=20) for rank in range(2)
    }
    links = {name: LinkEstimate(bandwidth_bps=1e3, error=0.02) for name in ("a", "b")}
    profile = Profile(
        plan=1, total_batch=200, entries=25_000_000, step_s=0.1, steps=20, newest_step=40, ranks=ranks, links=links
    )
    places = [Place(name, 0, 1.0) for name in ("a", "b")]
    began = replace(first_plan(1, "even", places, {}, 200), strategy_params={"sparsity": 0.9})
    own = run("a", "b")
    apart = replace(own, members=tuple(replace(m, island=m.node) for m in own.members))
    look = observed(
        asked,
        apart,
        node("a", {0: worker()}),
        node("b", {1: worker()}),
        profile=profile,
        profile_is_news=True,
        total_batch=200,
        batch_size=200,
        issued=(began,),
    )
    step = next_step(look, clock())
    said = [one.text for one in step.events if one.kind == "PLAN_KEPT"]
    assert len(said) == 1
    assert said[0].startswith("plan 1 stays: the planner finds no other. even the largest profiled sparsity 0.9999 ")
    assert step.refused
    again = next_step(changed(look, refused=(1, 1)), clock())
    assert not [one for one in again.events if one.kind == "PLAN_KEPT"]
    assert again.actions == step.actions


def test_a_plan_goes_to_every_node_that_its_stream_has_not_carried_it_to() -> None:
    nodes = node("a", {0: worker()}), node("b", {1: worker()})
    view = observed(job(), run("a", "b"), *nodes)
    first = view.plans.issued[0]
    view = changed(view, issued=(first, replace(first, id=2), replace(first, id=3)), sent={"a": 3, "b": 1})
    assert next_step(view, clock()).actions == (SendPlan("b", JOB, 1, 2), SendPlan("b", JOB, 1, 3))


@pytest.mark.parametrize("phase", [JobPhase.STARTING, JobPhase.RUNNING])
def test_an_agent_that_still_fetches_code_is_sent_no_plan_it_would_lose(phase: JobPhase) -> None:
    nodes = node("a", {0: worker()}), node("b", {1: worker(WorkerPhase.STARTING)})
    view = observed(job(phase), run("a", "b"), *nodes)
    view = changed(view, issued=(view.plans.issued[0], replace(view.plans.issued[0], id=2)))
    assert next_step(view, clock()).actions == (SendPlan("a", JOB, 1, 2),)


# STOPPING

STOPPING = {"fenced": True, "cause": Cause.LOSS, "grace_s": 3.0, "why": "rank 1 on b was killed"}


def test_a_fenced_run_is_stopped_until_nothing_of_it_is_left() -> None:
    record = ended(run("a", "b", **STOPPING), None, KILLED)
    step = next_step(observed(job(JobPhase.STOPPING), record, node("a", {0: worker()}), node("b")), clock())
    assert step.actions == (StopRun("a", JOB, 1, 3.0, "rank 1 on b was killed"),)
    drained = node("a", {0: worker(exit=exited(WorkerExitKind.DRAINED, 85, step=9))})
    after = next_step(observed(job(JobPhase.STOPPING), record, drained, node("b")), clock())
    assert after.job.status.phase is JobPhase.QUEUED
    assert after.job.status.reason == "rank 1 on b was lost: killed by signal 9"
    assert after.job.status.restarts == 0
    assert after.run is not None
    assert after.run.ended_unix_s == 5.0


def test_the_workers_of_a_lost_node_die_a_little_after_its_lease() -> None:
    def at(silent_s: float) -> JobPhase:
        record = ended(run("a", "b", **STOPPING), KILLED, None)
        gone = node("b", connected=False, last_message_s=NOW_S - silent_s)
        return next_step(observed(job(JobPhase.STOPPING), record, node("a"), gone), clock()).job.status.phase

    assert (at(3.4), at(3.6)) == (JobPhase.STOPPING, JobPhase.QUEUED)


def test_a_worker_that_never_began_is_not_waited_for() -> None:
    def heard(after_stop_s: float) -> JobPhase:
        record = ended(run("a", "b", **STOPPING), KILLED, None)
        quiet = node("b", last_message_s=NOW_S - 20 + after_stop_s)
        return next_step(observed(job(JobPhase.STOPPING), record, node("a"), quiet), clock()).job.status.phase

    assert (heard(1.0), heard(2.0)) == (JobPhase.STOPPING, JobPhase.QUEUED)


def test_a_failed_script_counts_and_waits() -> None:
    raised = exited(WorkerExitKind.FAILED, 3, "ValueError: x", step=9)
    record = ended(run("a", **STOPPING), raised)
    step = next_step(observed(job(JobPhase.STOPPING, spec=spec(max_restarts=1)), record, node("a")), clock())
    assert (step.job.status.phase, step.job.status.restarts, step.job.status.retry_delay_s) == (JobPhase.QUEUED, 1, 1.0)
    final = next_step(observed(changed(step.job, phase=JobPhase.STOPPING), record, node("a")), clock())
    assert (final.job.status.phase, final.job.status.exit_code) == (JobPhase.FAILED, 3)


def test_cancelling_a_run_that_is_stopping_already_hurries_it() -> None:
    record = run("a", fenced=True, cause=Cause.GROW, grace_s=10.0, why="growing")
    step = next_step(observed(job(JobPhase.STOPPING, cancel=True), record, node("a", {0: worker()})), clock())
    assert step.actions == (StopRun("a", JOB, 1, 2.0, "cancelled"),)


def test_cancel_waits_5_s_for_a_node_that_is_out_of_reach() -> None:
    def after(stopping_s: float) -> JobPhase:
        record = run("a", fenced=True, cause=Cause.CANCEL, grace_s=2.0, why="cancelled")
        gone = node("a", connected=False, last_message_s=NOW_S - 1)
        view = observed(job(JobPhase.STOPPING, cancel=True), record, gone, since_s=NOW_S - stopping_s)
        return next_step(view, clock()).job.status.phase

    assert (after(4.9), after(5.0)) == (JobPhase.STOPPING, JobPhase.CANCELLED)


def test_a_stop_that_came_too_late_is_done() -> None:
    record = ended(run("a", fenced=True, cause=Cause.GROW, why="growing"), None)
    step = next_step(observed(job(JobPhase.STOPPING), record, node("a", {0: worker(exit=FINISHED)})), clock())
    assert step.job.status.phase is JobPhase.DONE


@pytest.mark.parametrize("phase", [JobPhase.DONE, JobPhase.FAILED, JobPhase.CANCELLED])
def test_an_ended_job_needs_nothing(phase: JobPhase) -> None:
    record = job(phase)
    step = next_step(observed(record, run("a"), node("a", {0: worker()})), clock())
    assert (step.job, step.actions, step.events) == (record, (), ())


async def test_a_run_of_hundreds_may_end_at_one_moment(store: EtcdStore) -> None:
    """1. A run of 300 workers fails everywhere at once. 2. That must fit the one transaction that etcd takes, also
    where each event replaces an older one. 3. The first bad ends are told one by one, the rest is counted."""
    names = [f"n{i}" for i in range(300)]
    failed = exited(WorkerExitKind.FAILED, 1, "x" * 500)
    nodes = [node(name, {i: worker(exit=failed if i >= 100 else FINISHED)}) for i, name in enumerate(names)]
    step = next_step(observed(job(JobPhase.RUNNING, events=5000), run(*names), *nodes), clock())
    assert step.job.status.phase is JobPhase.STOPPING
    assert [e.kind for e in step.events] == ["WORKER_ENDED"] * 32 + ["WORKERS_ENDED", "STOPPING"]
    assert step.events[0].text.startswith("run 1: rank 100 on n100 failed with exit code 1")
    assert step.events[32].text == "run 1: 268 more workers ended: 168 failed, 100 finished"
    ledger = Ledger(store, Fence("/atoll/leader", await store.commit([Put("/atoll/leader", b"")])), lambda: None)
    state = await ledger.add(job(JobPhase.RUNNING), NewEvent(kind=EventKind.NOTICE, cause="added"))
    state.job = changed(state.job, events=5000)
    await ledger.write(state, step)
    assert len(await ledger.events(JOB, after=5000)) == 34
