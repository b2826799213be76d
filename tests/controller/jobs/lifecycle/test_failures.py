from __future__ import annotations

from dataclasses import replace

import pytest
from made import ended, exited, job, run, spec

from atoll.controller.jobs.model.failures import (
    GOOD_RUN_S,
    RunJudgement,
    has_recovered,
    judge,
    root_cause,
    start_deadline_s,
)
from atoll.controller.state.records import Cause, ExitRecord, JobPhase, JobRecord, RunFailure, WorkerExitKind

FINISHED = exited(WorkerExitKind.FINISHED)
PEER_LOST = exited(WorkerExitKind.PEER_LOST, 75, step=7)
RAISED = exited(WorkerExitKind.FAILED, 1, "ValueError: no such thing", step=7)
KILLED = exited(WorkerExitKind.SIGNALLED, -9, "killed by signal 9", step=7)
STOPPED = exited(WorkerExitKind.STOPPED, -9)
LOST = exited(WorkerExitKind.LOST, reason="node b is silent for 3 s")
DRAINED = exited(WorkerExitKind.DRAINED, 85)


def stopping(**fields: object) -> JobRecord:
    return job(JobPhase.STOPPING, spec=spec(max_restarts=2), **fields)


@pytest.mark.parametrize(
    ("first", "second", "guilty"),
    [
        (PEER_LOST, RAISED, 1),
        (RAISED, PEER_LOST, 0),
        (STOPPED, RAISED, 1),
        (DRAINED, RAISED, 1),
        (PEER_LOST, KILLED, 1),
        (exited(WorkerExitKind.FAILED, 1, "RuntimeError: [gloo] Connection closed by peer"), KILLED, 1),
        (exited(WorkerExitKind.FAILED, 1, "RuntimeError: [gloo] Connection closed by peer"), RAISED, 1),
        (RAISED, LOST, 1),
        (exited(WorkerExitKind.SIGNALLED, -6, "killed by signal 6"), RAISED, 1),
        (FINISHED, PEER_LOST, 1),
        (RAISED, RAISED, 0),
    ],
)
def test_who_was_the_cause(first: ExitRecord, second: ExitRecord, guilty: int) -> None:
    found = root_cause(ended(run("a", "b"), first, second).members)
    assert found is not None
    assert found[0].rank == guilty


def test_who_noticed_alone_is_not_called_lost() -> None:
    verdict = judge(stopping(), ended(run("a", "b"), STOPPED, PEER_LOST))
    assert verdict.reason.startswith("rank 1 on b lost a peer: ")


def test_none_is_guilty_when_all_finished() -> None:
    record = ended(run("a", "b"), FINISHED, FINISHED)
    assert root_cause(record.members) is None
    assert judge(stopping(), record).after is JobPhase.DONE


def test_a_script_failure_is_tried_again_later_and_later_until_the_restarts_are_used_up() -> None:
    record = ended(run("a", "b"), RAISED, PEER_LOST)
    first = judge(stopping(), record)
    assert (first.after, first.retry_delay_s, first.counts, first.code) == (JobPhase.QUEUED, 1.0, True, 1)
    assert first.reason == "rank 0 on a failed: ValueError: no such thing; restart 1 of 2 in 1 s"
    assert judge(stopping(restarts=1), record).retry_delay_s == 2.0
    last = judge(stopping(restarts=2), record)
    assert (last.after, last.code) == (JobPhase.FAILED, 1)
    assert last.reason == "rank 0 on a failed: ValueError: no such thing; all 2 restarts are used up"


def test_the_same_failure_at_the_same_step_twice_ends_the_job() -> None:
    record = ended(run("a", "b"), RAISED, PEER_LOST)
    first = judge(stopping(), record)
    second = judge(stopping(restarts=1, last_failure=first.failure), record)
    assert second.after is JobPhase.FAILED
    assert "the run before failed the same way at step 7" in second.reason


def test_the_same_failure_on_another_rank_is_the_same_failure() -> None:
    first = judge(stopping(), ended(run("a", "b"), RAISED, PEER_LOST))
    again = ended(run("a", "b"), PEER_LOST, RAISED)
    assert judge(stopping(restarts=1, last_failure=first.failure), again).after is JobPhase.FAILED


def test_another_step_is_another_failure() -> None:
    first = judge(stopping(), ended(run("a", "b"), RAISED, PEER_LOST))
    later = ended(run("a", "b"), replace(RAISED, step=9), PEER_LOST)
    assert judge(stopping(restarts=1, last_failure=first.failure), later).after is JobPhase.QUEUED


@pytest.mark.parametrize("exit", [KILLED, LOST, exited(WorkerExitKind.UNRESPONSIVE, -9, "no sign of life for 60 s")])
def test_what_came_from_outside_does_not_count(exit: ExitRecord) -> None:
    verdict = judge(stopping(restarts=2), ended(run("a", "b"), PEER_LOST, exit))
    assert (verdict.after, verdict.counts, verdict.retry_delay_s) == (JobPhase.QUEUED, False, 0.0)
    assert verdict.reason.startswith("rank 1 on b was lost: ")


def lose(*exits: ExitRecord) -> list[RunJudgement]:
    """One run after another that ends like this on rank 1, until the job ends."""
    verdicts: list[RunJudgement] = []
    for exit in exits:
        last = verdicts[-1].failure if verdicts else None
        verdicts.append(judge(stopping(last_failure=last), ended(run("a", "b"), PEER_LOST, exit)))
        if verdicts[-1].after is not JobPhase.QUEUED:
            break
    return verdicts


def test_losses_without_a_step_between_them_slow_down_and_end_the_job() -> None:
    """1. A worker needs more memory than its machine has and is killed at step 7. 2. It is so again in the next run,
    which is tried later and later, on whatever rank. 3. The eighth time ends the job, and says why."""
    verdicts = lose(*[KILLED] * 2000)
    assert [verdict.retry_delay_s for verdict in verdicts[:-1]] == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0]
    last = verdicts[-1]
    assert (len(verdicts), last.after, last.counts) == (8, JobPhase.FAILED, False)
    assert last.reason == (
        "rank 1 on b was lost: killed by signal 9; 8 times in a row at step 7, so another try would not help"
    )


def test_losses_with_a_step_between_them_never_end_the_job() -> None:
    verdicts = lose(*[replace(KILLED, step=step) for step in range(100)])
    assert {(verdict.after, verdict.retry_delay_s) for verdict in verdicts} == {(JobPhase.QUEUED, 0.0)}


def test_losses_of_a_script_that_tells_no_steps_count_anew_after_a_good_run() -> None:
    """1. A plain script tells no step. 2. It lost a machine twice, then trained for ten minutes. 3. Its losses count
    anew: one a day ends no job of weeks."""
    lost = RunFailure(kind=WorkerExitKind.LOST, step=0, code=0, reason="node b is silent for 3 s", times=2)
    assert has_recovered(job(last_failure=lost), GOOD_RUN_S, newest_step=0)
    assert not has_recovered(job(last_failure=lost), GOOD_RUN_S - 1, newest_step=0)
    assert not has_recovered(job(last_failure=replace(lost, times=1)), GOOD_RUN_S, newest_step=0)


@pytest.mark.parametrize(
    "reason", ["ModuleNotFoundError: No module named 'timm'", "ImportError: no name", "SyntaxError: invalid syntax"]
)
def test_a_script_that_does_not_load_is_not_tried_again(reason: str) -> None:
    verdict = judge(stopping(), ended(run("a", "b"), exited(WorkerExitKind.FAILED, 1, reason), PEER_LOST))
    assert (verdict.after, verdict.code) == (JobPhase.FAILED, 1)
    assert verdict.reason == f"rank 0 on a failed: {reason}; the code does not load, so another try would not help"


@pytest.mark.parametrize(("error", "step"), [("BadInput", 0), ("SettingError", 0), ("BadInput", 7)])
def test_what_atoll_refused_before_the_first_step_is_not_tried_again(error: str, step: int) -> None:
    """A model that run.prepare refuses was started twice. Of a later step, another try may go another way."""
    reason = f"atoll.errors.{error}: LBFGS evaluates the loss several times in one step"
    failed = replace(exited(WorkerExitKind.FAILED, 1, reason), step=step)
    verdict = judge(stopping(), ended(run("a", "b"), failed, PEER_LOST))
    assert verdict.after is (JobPhase.QUEUED if step else JobPhase.FAILED)
    assert step or verdict.reason.endswith(
        f"{reason}; Atoll refused it before the first step, so another try would not help"
    )


def test_a_crash_from_inside_counts_as_the_scripts_own() -> None:
    crash = exited(WorkerExitKind.SIGNALLED, -11, "killed by signal 11")
    assert judge(stopping(), ended(run("a", "b"), PEER_LOST, crash)).counts


def test_a_script_that_is_not_there_ends_the_job_at_once() -> None:
    missing = exited(WorkerExitKind.NOT_STARTED, reason="train.py is not in the code bundle")
    verdict = judge(stopping(), ended(run("a", "b"), missing, STOPPED))
    assert (verdict.after, verdict.reason) == (
        JobPhase.FAILED,
        "rank 0 on a could not start: train.py is not in the code bundle",
    )


def test_another_hindrance_at_the_start_is_tried_three_times() -> None:
    """Numbers in the reason, such as that of the run, do not make it another hindrance."""
    verdicts, last = [], None
    for number in (1, 2, 3):
        away = exited(WorkerExitKind.NOT_STARTED, reason=f"no folder run-{number}")
        verdict = judge(job(JobPhase.STOPPING, last_failure=last), ended(run("a", "b"), away, STOPPED))
        verdicts.append((verdict.after, verdict.retry_delay_s, verdict.counts))
        last = verdict.failure
    assert verdicts == [(JobPhase.QUEUED, 1.0, False), (JobPhase.QUEUED, 2.0, False), (JobPhase.FAILED, 0.0, False)]


@pytest.mark.parametrize("cause", [Cause.LEFT_EARLY, Cause.LOSS])
def test_a_rank_that_finishes_alone_is_a_script_failure(cause: Cause) -> None:
    record = replace(ended(run("a", "b"), FINISHED, PEER_LOST), cause=cause, why="rank 0 left early with exit code 0")
    verdict = judge(job(JobPhase.STOPPING), record)
    assert (verdict.after, verdict.code) == (JobPhase.FAILED, 1)
    assert verdict.reason.startswith("rank 0 left early with exit code 0")


def test_growing_goes_on_without_a_failure() -> None:
    record = replace(ended(run("a"), DRAINED), cause=Cause.GROW, why="growing from 1 to 2 workers")
    verdict = judge(stopping(), record)
    assert (verdict.after, verdict.reason, verdict.counts) == (JobPhase.QUEUED, "growing from 1 to 2 workers", False)


def test_a_late_start_is_not_the_scripts_doing_and_the_next_may_take_longer() -> None:
    """1. 8 MiB of code to 100 agents over 100 Mbit/s take 67 s; a start may take 60 s. 2. The run is stopped, which
    counts against no restart. 3. The next may take 120 s. 4. Where even eight minutes do not do, the job ends."""
    record = replace(ended(run("a"), STOPPED), cause=Cause.LATE, why="rank 0 on a did not start within 60 s")
    last, deadlines_s = None, []
    for _ in range(7):
        deadlines_s.append(start_deadline_s(stopping(last_failure=last)))
        verdict = judge(stopping(last_failure=last), record)
        assert (verdict.after, verdict.counts) == (JobPhase.QUEUED, False)
        last = verdict.failure
    assert deadlines_s == [60, 120, 240, 480, 480, 480, 480]
    assert judge(stopping(last_failure=last), record).after is JobPhase.FAILED


def test_cancelled_wins_over_everything() -> None:
    assert judge(stopping(cancel=True), ended(run("a"), RAISED)).after is JobPhase.CANCELLED


def test_a_script_that_always_ends_as_if_it_was_drained_is_not_started_in_a_tight_circle() -> None:
    """1. A script exits with 85 of its own accord, again and again at step 0. 2. An agent that is shut down lets its
    workers end in the same way, so it is tried again. 3. But with a pause, as long as no step is made in between."""
    record = replace(ended(run("a"), DRAINED), cause=Cause.LOSS, why="rank 0 on a stopped at a step boundary, step 0")
    first = judge(stopping(), record)
    assert (first.after, first.retry_delay_s, first.counts, first.reason) == (JobPhase.QUEUED, 0.0, False, record.why)
    second = judge(stopping(last_failure=first.failure), record)
    assert (second.after, second.retry_delay_s) == (JobPhase.QUEUED, 2.0)
