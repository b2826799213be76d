"""What a pass of the reconciler costs with thousands of devices, counted instead of timed."""

from __future__ import annotations

import sys
from types import FrameType

from reconciler_pass import Cluster

from atoll.controller.jobs.lifecycle.reconciler import RANKS_A_PASS
from atoll.controller.state.records import JobPhase

NODES, DEVICES, JOBS = 100, 8, 10


async def calls_of_a_pass(cluster: Cluster) -> int:
    """How many functions a pass calls."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        await cluster.reconciler.once()
    finally:
        sys.setprofile(None)
    return counted


async def training() -> Cluster:
    cluster = Cluster(NODES, DEVICES)
    await cluster.submit(JOBS, NODES * DEVICES // JOBS)
    for _ in range(6):
        cluster.now_s += 1.0
        cluster.report()
        await cluster.pass_s()
        await cluster.obey()
    assert cluster.phases() == {JobPhase.RUNNING}
    return cluster


async def test_a_pass_costs_little_for_each_worker() -> None:
    """1. 800 workers train, nothing happens: a pass called 62 functions for each of them, now 17. 2. Agents tell of new
    steps: with all profiles made anew, and held against the present plans, it called 450, now 60."""
    cluster = await training()
    cluster.now_s += 0.05
    assert await calls_of_a_pass(cluster) < 25 * NODES * DEVICES
    cluster.now_s += 1.0
    cluster.report()
    assert await calls_of_a_pass(cluster) < 90 * NODES * DEVICES


async def test_profiles_of_very_many_ranks_are_made_anew_in_several_passes() -> None:
    """1. Jobs of more ranks than a pass has room for tell of new steps. 2. A pass makes some of their profiles anew and
    asks for the next. 3. That goes on with the others, until none is left."""
    cluster = await training()
    cluster.now_s += 1.0
    cluster.report()
    runs = [cluster.progress.of(state.job.id, 1) for state in cluster.ledger.jobs.values()]

    def due() -> int:
        return sum(run is not None and run.profile_is_due(cluster.now_s) for run in runs)

    assert due() == JOBS
    cluster.reconciler._ranks_a_pass = 3 * NODES * DEVICES // JOBS
    left = []
    while due():
        await cluster.reconciler.once()
        left.append(due())
        assert cluster.reconciler._nudged.is_set() == bool(due())
        cluster.reconciler._nudged.clear()
    assert left == [7, 4, 1, 0]
    assert RANKS_A_PASS > NODES * DEVICES
