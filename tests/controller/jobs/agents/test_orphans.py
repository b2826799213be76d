from __future__ import annotations

from dataclasses import replace

from made import JOB, exited, job, node, run, worker

from atoll.controller.jobs.agents.orphans import orphan_actions
from atoll.controller.jobs.model.observed import DropMemory, ForgetWorker, StopRun, WorkerPhase
from atoll.controller.state.records import JobPhase, WorkerExitKind
from atoll.jobs.worker_key import WorkerKey

KEY = WorkerKey(JOB, 1, 0)
GONE = worker(exit=exited(WorkerExitKind.FINISHED))


def test_members_of_an_active_run_are_no_strays() -> None:
    for phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING):
        assert not list(orphan_actions({"a": node("a", {0: worker()})}, {JOB: (job(phase), run("a"))}, ()))


def test_a_worker_of_an_older_run_is_stopped() -> None:
    newer = {JOB: (job(run=2), run("a", number=2))}
    assert list(orphan_actions({"a": node("a", {0: worker()})}, newer, ())) == [
        StopRun("a", JOB, 1, 2.0, "a newer run replaces it")
    ]


def test_a_rank_on_another_node_than_its_own_is_stopped() -> None:
    found = list(orphan_actions({"b": node("b", {0: worker(WorkerPhase.STARTING)})}, {JOB: (job(), run("a"))}, ()))
    assert found == [StopRun("b", JOB, 1, 2.0, "a newer run replaces it")]


def test_workers_of_ended_and_unknown_jobs_are_stopped_and_forgotten() -> None:
    done = {JOB: (job(JobPhase.DONE), run("a"))}
    assert list(orphan_actions({"a": node("a", {0: GONE})}, done, ())) == [ForgetWorker("a", KEY)]
    assert list(orphan_actions({"a": node("a", {0: worker()})}, done, ())) == [
        StopRun("a", JOB, 1, 2.0, "its run is over; the job is done")
    ]
    assert list(orphan_actions({"a": node("a", {0: worker()})}, {}, ())) == [
        StopRun("a", JOB, 1, 2.0, "the controller knows no such job")
    ]


def test_a_job_whose_record_cannot_be_read_is_left_alone() -> None:
    assert not list(orphan_actions({"a": node("a", {0: worker()})}, {}, {JOB}))


def test_nothing_is_said_to_nodes_that_are_gone() -> None:
    assert not list(orphan_actions({"a": node("a", {0: worker()}, connected=False)}, {}, ()))


def test_memory_of_ended_and_unknown_jobs_is_given_back_and_of_all_others_kept() -> None:
    """Also of a job that waits, or whose record cannot be read: it may come back."""
    holds = {"a": replace(node("a", {}), memory_jobs=frozenset({JOB, "unknown"}))}
    for phase in JobPhase:
        found = list(orphan_actions(holds, {JOB: (job(phase), run("a"))}, ()))
        assert (DropMemory("a", JOB) in found) == phase.ended
        assert DropMemory("a", "unknown") in found
    assert not list(orphan_actions(holds, {}, {JOB, "unknown"}))
    assert not list(orphan_actions({"a": replace(holds["a"], connected=False)}, {}, ()))
