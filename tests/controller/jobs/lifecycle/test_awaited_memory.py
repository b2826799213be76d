"""A machine that is away and alone holds the newest state is worth waiting for, for as long as the lost steps took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import NOW_S, clock, ended, exited, free, job, node, observed, run

from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import JobStep, ObservedJob, ObservedNode
from atoll.controller.jobs.model.replica_placement import first_placement
from atoll.controller.state.records import JobPhase, WorkerExitKind
from atoll.controller.state.recovery import RecoveryRecord
from atoll.jobs.job_spec import Checkpoint

JOB = "tiny-0001"
LOST = exited(WorkerExitKind.LOST, reason="agent b is gone", step=12)


def holding(name: str, *, connected: bool = True, jobs: tuple[str, ...] = (JOB,)) -> ObservedNode:
    return replace(node(name, connected=connected), memory_jobs=frozenset(jobs))


def waiting(
    b: ObservedNode, *, queued_s: float = 2.0, memory_step: int = 12, checkpoint_step: int = 0, replicas: int = 1
) -> ObservedJob:
    """Steps 2 to 12 of the last run took 8 s; b is lost, and c is free in its stead."""
    recovery = RecoveryRecord(
        run=1, cause="b", began_step=2, reached_step=12, seen_unix_s=108.0, detected_unix_s=108.4, ended_unix_s=109.0
    )
    last = ended(run("a", "b", began_unix_s=100.0, recovery=recovery), exited(WorkerExitKind.PEER_LOST, step=12), LOST)
    nodes = {name: node(name).record for name in ("a", "b")}
    return observed(
        job(JobPhase.QUEUED, checkpoint_step=checkpoint_step), last, holding("a"), b, node("c"),
        since_s=NOW_S - queued_s, free=[free("a"), free("c")], memory_step=memory_step,
        placement=first_placement(1, last.members, nodes, Checkpoint(memory_replicas=replicas)),
    )  # fmt: skip


def starts(step: JobStep) -> bool:
    return step.job.status.phase is JobPhase.STARTING


def test_it_is_waited_for_and_the_devices_are_kept() -> None:
    step = next_step(waiting(holding("b", connected=False)), clock())
    assert not starts(step)
    assert step.job.status.reason == (
        "waiting 6 s for b to come back, whose memory alone has a part of step 12; else 12 steps are trained again"
    )
    assert [device.node for device in step.held] == ["a", "c"]


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(waiting(holding("b")), id="it is back"),
        pytest.param(waiting(holding("b", jobs=())), id="it is back and was started anew"),
        pytest.param(waiting(holding("b", connected=False), queued_s=7.8), id="the steps are trained as soon"),
        pytest.param(waiting(holding("b", connected=False), replicas=2), id="the other has a copy"),
        pytest.param(waiting(holding("b", connected=False), checkpoint_step=12), id="the disk is as new"),
        pytest.param(waiting(holding("b", connected=False), checkpoint_step=11), id="one step is not worth it"),
        pytest.param(waiting(holding("b", connected=False), memory_step=0), id="nothing is in memory"),
    ],
)
def test_the_next_run_starts_at_once(look: ObservedJob) -> None:
    assert starts(next_step(look, clock()))


def test_a_copy_that_is_away_too_is_waited_for_with_it() -> None:
    look = waiting(holding("b", connected=False), replicas=2)
    nodes = {**look.nodes, "a": holding("a", jobs=())}  # started anew: its memory is empty
    assert not starts(next_step(replace(look, nodes=nodes), clock()))


def test_no_wait_is_longer_than_half_a_minute() -> None:
    look = waiting(holding("b", connected=False))
    assert look.run is not None
    long_ago = replace(look, run=replace(look.run, began_unix_s=-9000.0))
    assert "waiting 28 s for b" in next_step(long_ago, clock()).job.status.reason
    assert starts(next_step(replace(long_ago, since_s=NOW_S - 30), clock()))
