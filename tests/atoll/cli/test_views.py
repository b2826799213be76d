"""What `atoll status` says of a job depends on whether it lives."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cli.render import views
from atoll.cli.render.follow import PlainScreen, fitting, verdict
from atoll.errors import JobCancelled, JobFailed
from atoll.v1.common_pb2 import (
    EVENT_KIND_RUNNING,
    EVENT_KIND_WORKER_NOTICE,
    LEVEL_INFO,
    LEVEL_WARNING,
    WORKER_STATE_EXITED,
    Event,
    Plan,
    WorkerStatus,
)
from atoll.v1.jobs_pb2 import PHASE_CANCELLED, PHASE_FAILED, PHASE_RUNNING, Job, Progress, Recovery, WorkerView


def job(**fields: Any) -> Job:
    made = Job(id="vit-3f9a", phase=PHASE_RUNNING, run=2, submitted_unix_s=100.0, **fields)
    made.spec.script, made.spec.min_workers, made.spec.max_workers = "train.py", 1, 2
    return made


def said(made: Job) -> str:
    return "\n".join(views.status_lines(made, now_s=160.0))


def test_what_ended_with_the_job_is_not_shown_of_it() -> None:
    """A job that was cancelled, or failed, in the middle of a recovery: its memory is given back, nobody recovers."""
    recovery = Recovery(run=1, detected_unix_s=150.0, cause="rank 1 was killed")
    living = job(checkpoint_step=400, memory_step=412, recovery=recovery, reason="run 2: 2 workers training")
    assert "checkpoint: newest at step 400; memory: step 412" in said(living)
    assert "recovering for 10.0 s: rank 1 was killed" in said(living)
    over = job(checkpoint_step=400, memory_step=412, recovery=recovery, reason="cancelled", ended_unix_s=155.0)
    over.phase = PHASE_CANCELLED
    assert said(over).splitlines()[0] == "vit-3f9a: cancelled"
    assert "memory" not in said(over)
    assert "recovering" not in said(over)


def test_a_recovery_that_came_about_stays_in_the_story() -> None:
    recovery = Recovery(run=1, seen_unix_s=110.0, resumed_unix_s=114.0, tier="memory", step=400, reached_step=400)
    told = "recovered in 4.0 s from the loss of run 1: memory, step 400, "
    assert told + "no steps lost" in said(job(recovery=recovery, ended_unix_s=155.0))
    recovery.reached_step = 0  # controller and agents were lost together: nobody heard of its last steps
    assert told + "steps lost unknown" in said(job(recovery=recovery, ended_unix_s=155.0))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("uses_atoll", [False, True])
def test_a_script_for_torchrun_is_told_that_its_checkpoints_are_its_own(uses_atoll: bool, ended: bool) -> None:
    there = WorkerStatus(state=WORKER_STATE_EXITED) if ended else WorkerStatus(pid=4711)
    there.uses_atoll = uses_atoll
    worker = WorkerView(status=there, share=0.5)
    told = said(job(workers=[worker, worker], plan=Plan(id=1, planner="even", reason="first")))
    assert ("saves its own" in told) is not uses_atoll
    assert ("no strategy and no plan" in told) is not uses_atoll
    assert ("strategy dense" in told and "plan 1 (even)" in told) is uses_atoll
    assert views.worker_row(worker)[5] == ("50.0 %" if uses_atoll else "-")


@pytest.mark.parametrize(("asked", "shown"), [("auto", "strategy auto: zen"), ("zen", "strategy zen")])
def test_a_strategy_that_the_controller_chose_is_shown_behind_auto(asked: str, shown: str) -> None:
    chosen = job(strategy="zen")
    chosen.spec.strategy = asked
    assert views.strategy_line(chosen).startswith(shown)


def test_the_steps_of_a_job_that_an_earlier_controller_saw_end_are_listed() -> None:
    ended = [WorkerView(status=WorkerStatus(state=WORKER_STATE_EXITED, step=step)) for step in (74, 75)]
    assert views.job_row(job(workers=ended), 0.0)[3] == "75"
    assert views.job_row(job(), 0.0)[3] == "-"


def test_progress_says_how_long_it_still_takes_until_it_is_over() -> None:
    progress = Progress(step=3, epoch=1, left_s=725.0)
    assert views.progress_line(job(progress=progress)) == "step 3  epoch 1  about 12 min left"
    assert "left" not in views.progress_line(job(progress=progress, ended_unix_s=155.0))


def test_who_cancels_is_told_how_it_goes_on() -> None:
    """1. From its checkpoint, as a new job. 2. It has none."""
    for checkpoint_step, on in (
        (415, " It goes on, as a new job, with: atoll restore vit-3f9a"),
        (0, ""),
    ):
        made = job(checkpoint_step=checkpoint_step, reason="cancelled")
        made.phase = PHASE_CANCELLED
        with pytest.raises(JobCancelled) as told:
            verdict(made)
        assert str(told.value) == f"vit-3f9a was cancelled.{on}"


def test_a_failed_job_says_why() -> None:
    made = job(reason="rank 0 on a failed: ValueError")
    made.phase = PHASE_FAILED
    with pytest.raises(JobFailed, match=r"vit-3f9a failed: rank 0 on a failed: ValueError\. Its output: atoll logs"):
        verdict(made)


def test_what_rank_0_tells_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It is in rank 0's output, which is followed too. A warning is shown in any case: the controller has such too."""
    screen = PlainScreen()
    screen.event(Event(kind=EVENT_KIND_RUNNING, level=LEVEL_INFO, text="running"))
    for rank, level, text in (
        (0, LEVEL_INFO, "rank 0: in memory every 4 steps"),
        (1, LEVEL_INFO, "rank 1: goes on without its file"),
        (0, LEVEL_WARNING, "rank 0: measurements were dropped"),
    ):
        screen.event(Event(kind=EVENT_KIND_WORKER_NOTICE, rank=rank, level=level, text=text))
    shown = capsys.readouterr().err.splitlines()
    assert [line.rpartition("  ")[2].strip() for line in shown] == [
        "rank 1: goes on without its file",
        "rank 0: measurements were dropped",
    ]


def test_a_long_reason_is_cut_for_a_terminal_alone() -> None:
    made = job(reason="rank 0 on a failed: " + 20 * "because ")
    assert views.job_row(made, now_s=160.0)[-1] == made.reason
    assert len(views.job_row(made, now_s=160.0, brief=True)[-1]) == 72


def test_status_shows_the_view_that_a_run_goes_on_in() -> None:
    assert "view" not in said(job(view=1))
    changed = job(view=2, membership="in force, 2 workers: rank 1 on b was killed")
    assert "view 2 of run 2 is in force, 2 workers: rank 1 on b was killed" in said(changed).splitlines()


def test_status_names_the_workers_that_are_reached_through_the_relay() -> None:
    workers = [WorkerView(rank=rank, node=f"n{rank}", island="lab") for rank in range(3)]
    assert "relay" not in said(job(workers=workers))
    for worker in workers:
        worker.behind_nat = True
    assert "relay" not in said(job(workers=workers))  # of one site: they dial each other
    workers[1].island, workers[0].behind_nat, workers[2].behind_nat = "home", False, False
    line = "through the relay: rank 1 (behind NAT in home), from and to other islands"
    assert line in said(job(workers=workers)).splitlines()
    many = [WorkerView(rank=rank, island=f"home-{rank}", behind_nat=True) for rank in range(14)]
    assert "rank 11 (behind NAT in home-11) and 2 more, from" in said(job(workers=many))


def test_a_narrow_terminal_goes_without_columns_and_cuts_none() -> None:
    row = ("0", "local-0", "running", "218", "85.2 %", "\u2501" * 17 + "   ", "8.01 ms", "6.20 ms")
    assert fitting([row], 80)[1] == [row]
    columns, rows = fitting([row], 46)
    assert columns == (">RANK", "NODE", ">BATCH", ">SHARE", ">TIME", ">WAIT")
    assert rows == [("0", "local-0", "218", "85.2 %", "8.01 ms", "6.20 ms")]
    assert fitting([row], 10)[0] == (">RANK", "NODE", ">SHARE")
