"""What is next for the views of a run, of what its workers report: one look each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import JOB, NOW_S, changed, clock, ended, exited, free, job, node, observed, run, spec, worker

from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import (
    JobStep,
    ObservedJob,
    ObservedViews,
    ObservedWorker,
    SendView,
    StopRun,
    ViewStage,
    WayIn,
    WorkerViewReport,
)
from atoll.controller.state.records import Cause, DeviceMemory, ExitRecord, JobPhase, RunRecord, Standby, WorkerExitKind
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState

KILLED = exited(WorkerExitKind.SIGNALLED, -9, "killed by signal 9", step=9)
WAY = WayIn(aborted_s=0.1, told_s=0.25, met_s=0.4, agreed_s=0.5, first_step_s=0.9)


def view(
    number: int = 1, state: ViewState = ViewState.IN_FORCE, ranks: tuple[int, ...] = (0, 1, 2), **fields: object
) -> ViewRecord:
    made = ViewRecord(
        job=JOB,
        run=1,
        view=number,
        state=state,
        cause=ViewCause.LAUNCH if number == 1 else ViewCause.LOSS,
        reason="because",
        ranks=ranks,
        has_state=ranks,
        master_address="a.lan",
        master_port=29500,
        plan=number,
        wanted=3,
        stepped_unix_s=1.0 if state is ViewState.IN_FORCE else 0.0,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def reporting(
    stage: ViewStage = ViewStage.TRAINING, number: int = 1, reason: str = "", step: int = 9
) -> ObservedWorker:
    word = WorkerViewReport(number, stage, step, reason, way=WAY if number > 1 else WayIn(), takes_in=True)
    return worker(step=step)._replace(view_report=word)


def look(
    *workers: ObservedWorker | None,
    views: tuple[ViewRecord, ...] = (view(),),
    record: RunRecord | None = None,
    **fields: object,
) -> ObservedJob:
    """Three nodes with a worker each, None where it is gone. fields: of ObservedViews, or of ObservedJob."""
    nodes = [
        node(name, {} if one is None else {rank: one})
        for rank, (name, one) in enumerate(zip("abc", workers, strict=True))
    ]
    own = {name: fields.pop(name) for name in ("since_s", "broken_since_s", "handed_since_s") if name in fields}
    seen = ObservedViews(**{"kept": views, "since_s": NOW_S, **own})  # type: ignore[arg-type]
    made = {"min_workers": 2, "max_workers": 3, **fields.pop("wants", {})}  # type: ignore[dict-item]
    begun = job(spec=spec(**made), view=views[-1].view)
    return changed(observed(begun, record or run("a", "b", "c"), *nodes), views=seen, judged_s=NOW_S + 1e6, **fields)


def gone(exit: ExitRecord = KILLED) -> ObservedWorker:
    return worker(exit=exit)


def told(step: JobStep) -> list[str]:
    return [event.text for event in step.events]


def test_the_survivors_of_a_killed_worker_are_the_next_view_and_the_job_goes_on_running() -> None:
    """1. Rank 1 is killed. 2. In the same look view 2 is proposed, of the others, with a plan and a place to meet; the
    job stays RUNNING and its run is not fenced. 3. Nothing is said to agents before that is written."""
    step = next_step(look(reporting(), gone(), reporting()), clock())
    assert step.job.status.phase is JobPhase.RUNNING
    assert (step.job.status.run, step.job.status.view) == (1, 2)
    assert step.run is not None
    assert not step.run.fenced
    [proposed] = step.views
    assert (proposed.view, proposed.state, proposed.ranks, proposed.has_state) == (
        2,
        ViewState.PROPOSED,
        (0, 2),
        (0, 2),
    )
    assert (proposed.lost, proposed.wanted, proposed.at_boundary) == (("rank 1 on b",), 3, False)
    assert step.plan is not None
    assert (step.plan.id, step.plan.view, step.plan.shares) == (2, 2, (1.0, 1.0))
    assert not [action for action in step.actions if isinstance(action, SendView | StopRun)]
    assert (
        told(step)[-1]
        == "view 2: rank 1 on b was killed at step 9: killed by signal 9; 2 workers continue in place (ranks 0, 2)"
    )


def test_members_who_make_their_step_without_a_lost_one_leave_at_its_end() -> None:
    """1. Rank 1 is killed; the others say that they make their step without it. 2. View 2 is left for at a boundary, by
    who stands still already too. 3. Where one of them does not, collectives are aborted, as ever."""

    def tolerates_loss_mid_step(made: ObservedWorker) -> ObservedWorker:
        assert made.view_report is not None
        return made._replace(view_report=made.view_report._replace(tolerates_loss_mid_step=True))

    for others, at_boundary in (
        ((tolerates_loss_mid_step(reporting()), tolerates_loss_mid_step(reporting())), True),
        ((tolerates_loss_mid_step(reporting()), reporting(ViewStage.BROKEN)), True),
        ((tolerates_loss_mid_step(reporting()), reporting()), False),
        ((reporting(ViewStage.BROKEN), reporting(ViewStage.BROKEN)), False),
    ):
        [proposed] = next_step(look(others[0], gone(), others[1]), clock()).views
        assert (proposed.ranks, proposed.at_boundary) == ((0, 2), at_boundary)


ALL = {"min_workers": 3}


def test_a_job_that_needs_all_its_workers_stands_still_until_another_is_ready() -> None:
    """1. Rank 1 of a job that needs three is killed. 2. Nobody is stopped and no view is proposed: rank 3 is launched
    on the device that it had, which no other job gets. 3. Rank 3 is ready: the next view has it, without state, where
    rank 1 was."""
    seen = look(reporting(ViewStage.BROKEN), gone(), reporting(), wants=ALL, free=[free("b")])
    waits = next_step(seen, clock())
    assert (waits.job.status.phase, waits.views) == (JobPhase.RUNNING, ())
    assert waits.run is not None
    assert [(member.rank, member.node, member.node_rank) for member in waits.run.members[3:]] == [(3, "b", 1)]
    assert told(waits)[-1] == "run 1: rank 3 on b/0 starts beside view 1, to join it"
    ready = node("b", {3: reporting(ViewStage.READY, 0)})
    nodes = {**seen.nodes, "b": ready}
    after = next_step(changed(seen, job=waits.job, run=waits.run, nodes=nodes), clock())
    [proposed] = after.views
    assert (proposed.ranks, proposed.has_state, proposed.at_boundary) == ((0, 3, 2), (0, 2), False)
    assert (proposed.lost, proposed.joined) == (("rank 1 on b",), ("rank 3 on b",))


STUCK = reporting(ViewStage.UNABLE, reason="its collective does not come back")
RAISED = exited(WorkerExitKind.FAILED, 1, "ValueError: x")


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (
            look(reporting(), gone(), reporting(), views=(view(state=ViewState.FORMING),)),
            "not all of its workers have completed a step",
        ),
        (
            look(worker(step=9), gone(), worker(step=9)),
            "rank 0 on a does not train yet, or not by atoll.init",
        ),
        (look(STUCK, gone(), reporting()), "rank 0 on a cannot: its collective does not come back"),
        (look(reporting(), gone(RAISED), reporting()), "rank 1 ended by itself"),
        (
            look(
                reporting(), gone(), reporting()._replace(view_report=WorkerViewReport(1, ViewStage.BROKEN)), wants=ALL
            ),
            "2 of at least 3 workers are left",
        ),
        (
            look(reporting(), gone(), reporting(), wants=ALL, broken_since_s=NOW_S - 91),
            "2 of at least 3 workers are left, and none was ready in their stead within 90 s",
        ),
        (look(reporting()._replace(trained=True), gone(), reporting()), "rank 0 on a has trained already"),
        (look(gone(), gone(), gone()), "nobody is left who has its state"),
    ],
)
def test_what_cannot_go_on_in_place_starts_again_and_says_why(seen: ObservedJob, reason: str) -> None:
    step = next_step(seen, clock())
    assert step.job.status.phase is JobPhase.STOPPING
    assert step.run is not None
    assert (step.run.fenced, step.run.cause) == (True, Cause.LOSS)
    assert all(one.state is ViewState.ABANDONED for one in step.views)
    assert f"run 1 cannot continue in place: {reason}" in told(step)


def test_a_machine_that_its_peers_and_the_controller_miss_alike_is_not_waited_for() -> None:
    """1. A machine falls silent: its agent's stream is gone for 2 s, its lease of 3 s still runs. 2. Its peers'
    collectives failed: both say so. 3. It counts as lost now, not a second later. 4. While one of them trains, it does
    not."""
    away = node("b", {}, connected=False, last_message_s=NOW_S - 2)
    for other, is_lost in ((ViewStage.BROKEN, True), (ViewStage.TRAINING, False)):
        seen = look(reporting(ViewStage.BROKEN), None, reporting(other), broken_since_s=NOW_S)
        step = next_step(changed(seen, nodes={**seen.nodes, "b": away}), clock())
        assert [one.ranks for one in step.views] == ([(0, 2)] if is_lost else [])
        assert bool(step.views and step.views[0].seen_unix_s == 3.0) is is_lost, "2 s before now"


def test_members_that_only_lost_touch_are_the_next_view_again() -> None:
    broken = reporting(ViewStage.BROKEN, reason="connection reset")
    assert next_step(look(broken, broken, broken, broken_since_s=NOW_S - 0.9), clock()).views == ()
    [again] = next_step(look(broken, broken, broken, broken_since_s=NOW_S - 1.1), clock()).views
    assert (again.ranks, again.cause, again.lost) == ((0, 1, 2), ViewCause.BROKEN, ())


def test_a_view_is_in_force_when_all_train_in_it_and_the_one_before_is_over() -> None:
    views = (view(1), view(2, ViewState.FORMING, (0, 2)))
    record = ended(run("a", "b", "c"), None, KILLED, None)
    trains = reporting(number=2, step=9)
    assert (
        next_step(look(trains, None, reporting(ViewStage.FORMING, 2), views=views, record=record), clock()).views == ()
    )
    step = next_step(look(trains, None, trains, views=views, record=record), clock())
    assert [(one.view, one.state) for one in step.views] == [(1, ViewState.ABANDONED), (2, ViewState.IN_FORCE)]


def test_a_change_is_told_in_one_sentence_with_its_parts() -> None:
    proposed = view(
        2,
        ViewState.IN_FORCE,
        (0, 2),
        stepped_unix_s=0.0,
        step=9,
        lost=("rank 1 on b",),
        seen_unix_s=10.0,
        proposed_unix_s=10.3,
    )
    record = ended(run("a", "b", "c"), None, KILLED, None)
    trains = reporting(number=2, step=11)
    step = next_step(look(trains, None, trains, views=(view(1, ViewState.ABANDONED), proposed), record=record), clock())
    assert told(step) == [
        "view 2: 2 workers continued in place after 0.95 s from step 9: 0.05 noticed, 0.10 aborted, 0.15 told, "
        "0.15 formed, 0.10 agreed, 0.40 first step; rank 1 on b lost"
    ]


def test_the_first_step_after_a_launch_is_told_once() -> None:
    """1. One of three has not completed a step. 2. All have: it is told, with the seconds since the launch. 3. Never
    again."""
    launched = view(1, stepped_unix_s=0.0, proposed_unix_s=clock().unix_s - 4.1)
    trains, waits = reporting(step=1), reporting(step=0)
    assert told(next_step(look(trains, waits, trains, views=(launched,)), clock())) == []
    step = next_step(look(trains, trains, trains, views=(launched,)), clock())
    assert told(step) == ["view 1: 3 workers completed their first step 4.1 s after the launch"]
    assert told(next_step(look(trains, trains, trains, views=step.views), clock())) == []


def test_who_does_not_stand_still_in_time_starts_the_run_again() -> None:
    views, record = (view(1), view(2, ViewState.PROPOSED, (0, 2))), ended(run("a", "b", "c"), None, KILLED, None)
    workers = (reporting(ViewStage.FORMING, 2), None, reporting(ViewStage.TRAINING, 1))
    assert next_step(look(*workers, views=views, record=record, since_s=NOW_S - 9), clock()).views == ()
    step = next_step(look(*workers, views=views, record=record, since_s=NOW_S - 11), clock())
    assert "run 1 cannot continue in place: rank 2 on c did not stand still within 10 s" in told(step)
    assert step.job.status.phase is JobPhase.STOPPING


FORMS = (view(1), view(2, ViewState.FORMING, (0, 2)))
LEAVES = (view(1), view(2, ViewState.PROPOSED, (0, 2), at_boundary=True))
STANDS = (view(1), view(2, ViewState.PROPOSED, (0, 2)))


@pytest.mark.parametrize(
    ("views", "moved_s", "late"),
    [
        (FORMS, None, "did not come to train in view 2 within 15 s"),
        (FORMS, 59, ""),
        (FORMS, 61, "did not come to train in view 2 within 60 s"),
        (LEAVES, None, "came to no step boundary within 60 s"),
        (LEAVES, 59, ""),
        (LEAVES, 61, "came to no step boundary within 60 s"),
        (STANDS, 1, "did not stand still within 10 s"),
    ],
)
def test_members_are_waited_for_while_state_moves_between_them(
    views: tuple[ViewRecord, ...], moved_s: float | None, late: str
) -> None:
    """They hand over for 400 s, and the last bytes moved so long ago, or none did. Who is lost is no reason to hand
    anything over: then nothing that moved counts."""
    record = ended(run("a", "b", "c"), None, KILLED, None)
    seen = look(
        reporting(ViewStage.FORMING if views is not LEAVES else ViewStage.TRAINING, 2 if views is not LEAVES else 1),
        None,
        reporting(ViewStage.TRAINING, 1),
        views=views,
        record=record,
        since_s=NOW_S - 400,
        handed_since_s=0.0 if moved_s is None else NOW_S - moved_s,
    )
    step = next_step(seen, clock())
    said = [one.reason for one in step.views] + told(step)
    assert (not said) if not late else any(late in one for one in said), said


def test_a_lost_worker_is_replaced_by_one_that_joins_while_the_others_train() -> None:
    """1. Two of three go on in view 2; the device of the third is free. 2. A worker is launched on it, with the next
    rank; it is in no view. 3. Only when it is ready is view 3 proposed, at a boundary, with it in the place of the lost
    one; its state does not count."""
    views = (view(1, ViewState.ABANDONED), view(2, ranks=(0, 2)))
    record = ended(run("a", "b", "c"), None, KILLED, None)
    trains = reporting(number=2)
    step = next_step(look(trains, None, trains, views=views, record=record, free=[free("b")]), clock())
    assert step.run is not None
    assert [(m.rank, m.node) for m in step.run.members] == [(0, "a"), (1, "b"), (2, "c"), (3, "b")]
    for stage, ranks in ((ViewStage.JOINING, []), (ViewStage.READY, [(0, 3, 2)])):
        seen = look(trains, None, trains, views=views, record=step.run)
        joiner = node("b", {3: reporting(stage, 0)})
        after = next_step(changed(seen, nodes={**seen.nodes, "b": joiner}), clock())
        assert [one.ranks for one in after.views] == ranks
        assert all((one.at_boundary, one.has_state, one.cause) == (True, (0, 2), ViewCause.JOIN) for one in after.views)


@pytest.mark.parametrize(("least", "joins"), [(3, ["a", "b", "c", "b"]), (2, ["a", "b", "c"])])
def test_a_device_that_was_left_out_as_slow_is_better_than_to_stand_still(least: int, joins: list[str]) -> None:
    """1. The third of three is lost. The one free device waits as a standby, for it would slow the job down. 2. Where
    the job cannot go on with two it is taken; where it can, it goes on waiting."""
    views = (view(1),) if least == 3 else (view(1, ViewState.ABANDONED), view(2, ranks=(0, 2)))
    record, trains = ended(run("a", "b", "c"), None, KILLED, None), reporting(number=views[-1].view)
    seen = look(trains, None, trains, views=views, record=record, wants={"min_workers": least}, free=[free("b")])
    learned = replace(seen.job.learned, standby={"b/0": Standby(reason="it is slow")})
    step = next_step(replace(seen, job=replace(seen.job, learned=learned)), clock())
    assert step.run is not None
    assert [member.node for member in step.run.members] == joins


def test_a_lost_stage_leaves_its_pipeline_out_and_the_others_keep_their_order() -> None:
    """1. Three pipelines of two stages; of the first one the second stage is killed. 2. The next view has the other
    two, stage by stage, with its first member on a node that offers a port, and waits for nobody in their stead: the
    pipeline comes back with a new run. 3. Where the job needs three pipelines, or none is whole, it starts again."""
    nodes, ports = "abcdef", {"e": (29501,)}

    def decided(*exits: ExitRecord | None, least: int) -> JobStep:
        broken = reporting()._replace(view_report=WorkerViewReport(1, ViewStage.BROKEN, 9))
        workers = [broken if exit is None else gone(exit) for exit in exits]
        wants = {"strategy": "groups", "strategy_settings": {"stages": 2}, "min_workers": least, "max_workers": 6}
        seen = observed(
            job(spec=spec(**wants), view=1),
            run(*nodes),
            *(node(name, {rank: workers[rank]}) for rank, name in enumerate(nodes)),
        )
        views = ObservedViews(kept=(view(ranks=tuple(range(6)), wanted=6),), since_s=NOW_S)
        devices = replace(seen.devices, ports=ports)
        return next_step(changed(seen, views=views, judged_s=NOW_S + 1e6, devices=devices), clock())

    (proposed,) = decided(None, KILLED, None, None, None, None, least=2).views
    assert (proposed.ranks, proposed.has_state, proposed.wanted) == ((4, 5, 2, 3), (4, 5, 2, 3), 4)
    assert (proposed.lost, proposed.at_boundary) == (("rank 1 on b",), False)
    again = {
        "4 of at least 6 workers are left": decided(None, KILLED, None, None, None, None, least=6),
        "no pipeline has all of its stages left": decided(None, KILLED, KILLED, None, KILLED, None, least=2),
    }
    for reason, step in again.items():
        assert step.run is not None
        assert step.run.fenced
        assert any(reason in text for text in told(step)), told(step)


def test_members_of_whom_one_ran_out_of_memory_meet_again_at_once_with_less_for_it() -> None:
    """1. Rank 0 reports that memory did not suffice; the others noticed. 2. The same members are the next view, without
    a wait for news of a loss. 3. Its device gets less, the others take the rest."""
    word = WorkerViewReport(1, ViewStage.BROKEN, 9, "no memory", takes_in=True, overflow_batch=171)
    full = worker(step=9)._replace(view_report=word)
    others = [reporting(ViewStage.BROKEN), reporting(ViewStage.BROKEN)]
    known = {name: DeviceMemory(trained=128) for name in ("a/0", "b/0", "c/0")}
    learned = {"memory": known, "total_batch": 384, "speeds": {"a/0": 0.5, "b/0": 1.0, "c/0": 1.0}}
    seen = look(full, *others, broken_since_s=NOW_S)
    step = next_step(replace(seen, job=changed(seen.job, **learned)), clock())
    [proposed] = step.views
    assert (proposed.cause, proposed.ranks, proposed.has_state) == (ViewCause.BROKEN, (0, 1, 2), (0, 1, 2))
    assert proposed.reason == "rank 0 on a ran out of memory with 171 samples"
    assert step.job.learned.memory["a/0"].max_batch == 149
    assert step.plan is not None
    assert step.plan.shares == (149.0, 118.0, 117.0)
    assert "a/0 ran out of memory with 171 samples: plans give it at most 149 from now on" in told(step)
    unsure = next_step(look(full, others[0], reporting(), broken_since_s=NOW_S), clock())
    assert not unsure.views
