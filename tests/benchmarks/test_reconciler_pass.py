"""What a pass of the reconciler costs with thousands of devices, counted instead of timed."""

from __future__ import annotations

import gc
import sys
from types import FrameType

from reconciler_pass import LargeCluster

from atoll.cli.commands.daemons import tune_collector
from atoll.controller.jobs.lifecycle.reconciler import RANKS_A_PASS
from atoll.controller.state.records import JobPhase
from atoll.v1 import common_pb2

NODES, DEVICES, JOBS = 50, 8, 10


async def calls_of_a_pass(cluster: LargeCluster) -> int:
    """How many functions a pass calls."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        await cluster.leader.reconciler.once()
    finally:
        sys.setprofile(None)
    return counted


async def training() -> LargeCluster:
    cluster = LargeCluster(NODES, DEVICES)
    await cluster.submit(JOBS, NODES * DEVICES // JOBS)
    for _ in range(6):
        cluster.now_s += 1.0
        cluster.report()
        await cluster.pass_s()
        await cluster.leader.obey()
    assert cluster.phases() == {JobPhase.RUNNING}
    return cluster


async def test_a_pass_costs_little_for_each_worker() -> None:
    """1. 400 workers train, nothing happens: a pass called 62 functions for each of them, now 3. 2. One worker trains
    no more: only its job is looked at. 3. Agents tell of new steps: with all profiles made anew, and held against the
    present plans, it called 450, now 60."""
    cluster = await training()
    cluster.now_s += 0.05
    await cluster.pass_s()
    assert await calls_of_a_pass(cluster) < 4 * NODES * DEVICES
    first = next(iter(cluster.agents.values()))
    next(iter(first.workers.values())).view.stage = common_pb2.VIEW_STAGE_BROKEN
    assert cluster.leader.sessions.connected[first.name].report(first.workers.values(), [29500])
    assert await calls_of_a_pass(cluster) < (4 + 30 / JOBS) * NODES * DEVICES
    assert [s.broken_since_s is None for s in cluster.leader.ledger.jobs.values()].count(False) == 1
    cluster.now_s += 1.0
    cluster.report()
    assert await calls_of_a_pass(cluster) < 90 * NODES * DEVICES


async def test_no_pass_sets_off_a_collection() -> None:
    """1. The collector is tuned as a daemon's. 2. Agents tell of new steps, and a pass answers: it had set off dozens
    of collections, each through whatever was young or held."""
    cluster, thresholds, collected = await training(), gc.get_threshold(), list[str]()
    tune_collector()
    gc.callbacks.append(lambda phase, info: collected.append(phase))
    try:
        cluster.now_s += 1.0
        cluster.report()
        await cluster.pass_s()
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    assert not collected


async def test_profiles_of_very_many_ranks_are_made_anew_in_several_passes() -> None:
    """1. Jobs of more ranks than a pass has room for tell of new steps. 2. A pass makes some of their profiles anew and
    asks for the next. 3. That goes on with the others, until none is left."""
    cluster = await training()
    cluster.now_s += 1.0
    cluster.report()
    runs = [cluster.leader.progress.of(state.job.id, 1) for state in cluster.leader.ledger.jobs.values()]

    def due() -> int:
        return sum(run is not None and run.profile_is_due(cluster.now_s) for run in runs)

    assert due() == JOBS
    cluster.leader.reconciler._ranks_a_pass = 3 * NODES * DEVICES // JOBS
    left = []
    while due():
        await cluster.leader.reconciler.once()
        left.append(due())
        assert cluster.leader.reconciler._nudged.is_set() == bool(due())
        cluster.leader.reconciler._nudged.clear()
    assert left == [7, 4, 1, 0]
    assert RANKS_A_PASS > NODES * DEVICES
