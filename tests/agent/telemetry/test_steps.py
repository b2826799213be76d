"""What agents make of steps before they tell them, and what the controller then knows."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from atoll.agent.telemetry.collect import Collector
from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.run import RunEstimators
from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.services.checks import check_telemetry
from atoll.controller.state.records import RunMember, RunRecord
from atoll.errors import BadInput
from atoll.jobs.worker_key import WorkerKey
from atoll.step_estimators.wire import step_from_wire
from atoll.telemetry.telemetry_limits import MAX_STEPS
from atoll.v1.agents_pb2 import StepSums, Telemetry, WorkerTelemetry
from atoll.v1.common_pb2 import StepSample

JOB, RANKS, NODES = "vit-1234", 8, ("a", "b")


def node_of(rank: int) -> str:
    return NODES[rank * len(NODES) // RANKS]


RUN = RunRecord(
    job=JOB,
    run=1,
    members=tuple(
        RunMember(rank=r, node=node_of(r), device=r % 4, node_rank=r // 4, local_rank=r % 4, local_world_size=4)
        for r in range(RANKS)
    ),
    master_address="a",
    master_port=29500,
    began_unix_s=0.0,
)


def steps_of(rank: int, steps: int, rng: random.Random) -> Iterator[StepSample]:
    """Ranks of unequal speed, under two plans; every fifth step is sampled; the last of an epoch is short."""
    for step in range(steps):
        plan = 1 if step < steps // 2 else 2
        local = 10 if plan == 1 else 6 + rank
        total = RANKS * 10 if plan == 1 else sum(6 + r for r in range(RANKS))
        if step % 17 == 16:
            local, total = 1, RANKS
        compute_s = (0.01 + 0.004 * local) * (1 + rank / 10) * rng.lognormvariate(0, 0.03)
        sampled = step % 5 == 0
        yield StepSample(
            step=step, plan=plan, local_batch=local, total_batch=total, step_s=compute_s + 0.02, compute_s=compute_s,
            load_s=0.1 * compute_s, forward_s=0.3 * compute_s, backward_s=0.5 * compute_s,
            first_bucket_s=0.1 * compute_s * rng.lognormvariate(0, 0.1), update_s=0.1 * compute_s,
            sync_s=0.02 * rng.lognormvariate(0, 0.2), last_sync_s=0.01 * rng.lognormvariate(0, 0.2),
            local_grad_sqnorm=rng.uniform(1.0, 1.4) if sampled else 0.0, global_grad_sqnorm=1.0 if sampled else 0.0,
        )  # fmt: skip


def told(collectors: dict[str, Collector], board: ProgressBoard) -> list[Telemetry]:
    """Everything that the agents have to tell, as the controller takes it."""
    messages = []
    for node, collector in collectors.items():
        for message in collector.take():
            check_telemetry(message)
            messages.append(Telemetry.FromString(message.SerializeToString()))
            for sums in messages[-1].sums:
                board.observe_sums(node, sums)
            for worker in messages[-1].workers:
                board.observe(worker)
    return messages


def flat(profile: Profile) -> list[float]:
    """All its numbers, in order."""

    def numbers(value: object) -> Iterator[float]:
        match value:
            case bool() | None:
                return
            case int() | float():
                yield float(value)
            case dict():
                yield from (n for key, each in sorted(value.items()) for n in (*numbers(key), *numbers(each)))
            case list() | tuple():
                yield from (n for each in value for n in numbers(each))

    return list(numbers(dataclasses.asdict(profile)))


@pytest.mark.parametrize("reporting", ["each rank at its own moment", "all at once"])
def test_of_what_agents_made_the_controller_has_the_profile_of_all_steps(reporting: str) -> None:
    """1. Eight ranks on two nodes train 200 steps, with noise, two plans and short batches. 2. Workers tell their steps
    at different moments, agents what they made of them, every few steps. 3. The controller's profile is that of all
    1,600 steps told one by one, for each of which it took 57 µs. (Squared norms are added up in another order.)"""
    rng = random.Random(5)
    steps = {rank: list(steps_of(rank, 200, rng)) for rank in range(RANKS)}
    one_by_one, board = RunEstimators(), ProgressBoard()
    progress = board.begin(RUN)
    collectors = {node: Collector() for node in NODES}
    for rank in range(RANKS):
        collectors[node_of(rank)].estimate(WorkerKey(JOB, 1, rank))
    for start in range(0, 200, 10):
        for rank in range(RANKS):
            for sample in steps[rank][start : start + 10]:
                one_by_one.observe(rank, step_from_wire(sample))
                telemetry = WorkerTelemetry(id=WorkerKey(JOB, 1, rank).to_wire(), steps=[sample])
                collectors[node_of(rank)].add(WorkerKey(JOB, 1, rank), telemetry)
            if reporting == "each rank at its own moment":
                told(collectors, board)
        told(collectors, board)
    expected, found = one_by_one.profile(), progress.estimators.profile()
    assert found.noise is not None
    assert expected.overlap is not None
    assert len(found.ranks) == RANKS
    assert all(rank.estimate is not None for rank in found.ranks.values())
    assert replace(found, noise=None) == replace(expected, noise=None)
    assert flat(found) == pytest.approx(flat(expected), rel=1e-9)
    assert progress.newest_step == 199
    assert progress.measured_s(2) > 0  # rank 0's own steps, for users


def test_a_step_of_every_rank_is_not_a_message_of_its_own() -> None:
    """256 steps of a rank were 256 messages; now it is the newest, and of rank 0 all."""
    collector, rng = Collector(), random.Random(1)
    for rank in (0, 1):
        collector.estimate(WorkerKey(JOB, 1, rank))
        told = WorkerTelemetry(id=WorkerKey(JOB, 1, rank).to_wire(), steps=steps_of(rank, MAX_STEPS, rng))
        collector.add(WorkerKey(JOB, 1, rank), told)
    (message,) = collector.take()
    first, second = message.workers
    assert (len(first.steps), len(second.steps), second.steps[0].step) == (MAX_STEPS, 1, MAX_STEPS - 1)
    assert second.estimate.last_step == MAX_STEPS - 1
    assert (len(message.sums), list(message.sums[0].ranks)) == (1, [2] * (MAX_STEPS - 2))  # but a run's first two
    assert second.ByteSize() < 1000
    assert list(collector.take()) == []


def test_a_report_that_is_lost_is_in_the_next_one() -> None:
    """1. A stream breaks with ten steps in it. 2. They are in the next estimate, so none was dropped."""
    collector, rng, key = Collector(), random.Random(1), WorkerKey(JOB, 1, 1)
    collector.estimate(key)
    every = list(steps_of(1, 20, rng))
    collector.add(key, WorkerTelemetry(id=key.to_wire(), steps=every[:10]))
    for message in collector.take():
        collector.lost(message)
    collector.add(key, WorkerTelemetry(id=key.to_wire(), steps=every[10:]))
    (message,) = collector.take()
    assert message.workers[0].dropped_steps == 0
    alone = RunEstimators()
    for sample in every:
        alone.observe(1, step_from_wire(sample))
    assert message.workers[0].estimate.profile.compute_s == alone.profile().ranks[1].compute_s


def test_a_node_speaks_for_no_run_of_others() -> None:
    board = ProgressBoard()
    progress = board.begin(RUN)
    sums = StepSums(job=JOB, run=1, steps=[7], ranks=[8], sync_s=[0.0], last_sync_s=[0.0])
    board.observe_sums("c", sums)
    board.observe_sums("a", StepSums(job=JOB, run=2, steps=[7], ranks=[8], sync_s=[0.0], last_sync_s=[0.0]))
    assert progress.estimators._overlap._syncs == {}
    board.observe_sums("a", sums)
    assert list(progress.estimators._overlap._syncs) == [7]


@pytest.mark.parametrize(
    ("telemetry", "field"),
    [
        (Telemetry(sums=[StepSums(job=JOB, run=1, steps=[1, 2], ranks=[1])]), "columns"),
        (Telemetry(sums=[StepSums(job=JOB, run=0)]), "run 0"),
        (Telemetry(sums=[StepSums(job="../x", run=1)]), "no such run"),
        (
            Telemetry(sums=[StepSums(job=JOB, run=1, steps=[1], ranks=[1], sync_s=[math.nan], last_sync_s=[0.0])]),
            "at least 0",
        ),
        (Telemetry(sums=[StepSums(job=JOB, run=1)] * 65), "at most 64"),
    ],
)
def test_sums_that_make_no_sense_are_refused_by_name(telemetry: Telemetry, field: str) -> None:
    with pytest.raises(BadInput, match=field):
        check_telemetry(telemetry)


@pytest.mark.parametrize(
    ("path", "value"),
    [("step_s", math.nan), ("stall_share", -1.0), ("profile.compute_s", math.inf), ("profile.point_errors", [0.1])],
)
def test_estimates_that_make_no_sense_are_refused(path: str, value: object) -> None:
    collector, key = Collector(), WorkerKey(JOB, 1, 1)
    collector.estimate(key)
    collector.add(key, WorkerTelemetry(id=key.to_wire(), steps=steps_of(1, 20, random.Random(1))))
    (message,) = collector.take()
    check_telemetry(message)
    *parents, name = path.split(".")
    at = message.workers[0].estimate
    for parent in parents:
        at = getattr(at, parent)
    if isinstance(value, list):
        getattr(at, name).extend(value)
    else:
        setattr(at, name, value)
    with pytest.raises(BadInput, match="estimate"):
        check_telemetry(message)


def test_what_was_measured_in_an_older_view_is_not_told_in_a_newer_one() -> None:
    """1. A worker measures steps in view 1; before they are told it is in view 2. 2. Its telemetry of view 2 has none
    of them. 3. What comes late, of view 1, changes nothing."""
    collector, key = Collector(), WorkerKey(JOB, 1, 0)
    samples = list(steps_of(0, 6, random.Random(1)))
    collector.add(key, WorkerTelemetry(steps=samples[:3], memory_step=2, view=1))
    collector.add(key, WorkerTelemetry(steps=samples[3:5], view=2))
    collector.add(key, WorkerTelemetry(steps=samples[5:], memory_step=9, view=1))
    [told] = [worker for telemetry in collector.take() for worker in telemetry.workers]
    assert (told.view, [s.step for s in told.steps], told.memory_step) == (2, [3, 4], 0)


def test_sums_are_of_one_view_each() -> None:
    collector, key = Collector(), WorkerKey(JOB, 1, 0)
    collector.estimate(key)
    samples = list(steps_of(0, 60, random.Random(1)))
    collector.add(key, WorkerTelemetry(steps=samples[:50], view=1))
    collector.add(key, WorkerTelemetry(steps=samples[50:], view=2))
    told = {sums.view: list(sums.steps) for telemetry in collector.take() for sums in telemetry.sums}
    assert set(told) == {1, 2}
    assert max(told[1]) < 50 <= min(told[2])
