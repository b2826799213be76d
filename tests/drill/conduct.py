"""One drill from its first process to its last, and what it found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.cli.render import wire
from atoll.client.client import ENDED, AsyncClient
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb
from drill import evidence as evidence_
from drill import invariants, overflow, training
from drill.cluster import DrillCluster
from drill.crowd import CrowdLeft
from drill.evidence import Evidence
from drill.figures import StrikeCost, effective_ratio, median_step_s, recoveries
from drill.invariants import InvariantResult
from drill.recording import FULL_SPEED
from drill.schedule import Hit, Planned, Strike, plan
from drill.settings import Settings
from drill.slow_disk import slow
from drill.strikes import Striker
from drill.watch import Watch

_READY_S: Final = 60.0
_LEADERLESS_S: Final = 60.0
_LAST_PIECE_S: Final = 0.7
"""For each of some twenty pieces: longer than a stopped worker that does not save is given."""


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """What came of it."""

    verdicts: tuple[InvariantResult, ...]
    recoveries: tuple[StrikeCost, ...]
    missed: tuple[Planned, ...]
    """Strikes that found nobody."""
    ratio: float
    """Effective training time: time in steps that count over wall time."""
    step_s: float
    length_s: float
    story: tuple[str, ...]
    """The job's events, in words."""

    @property
    def holds(self) -> bool:
        return all(verdict.holds for verdict in self.verdicts)


@dataclass(slots=True)
class _Observed:
    """What is known when the cluster still stands."""

    evidence: Evidence
    undisturbed: Evidence | None
    """None where the job did not come to an end that could be compared."""
    job: pb.Job
    hits: Sequence[Hit]
    missed: Sequence[Planned]
    watch: Watch
    began_s: float
    ended_s: float
    trained_to_the_end: bool
    fallen: Sequence[str]
    crowds: Sequence[CrowdLeft]


async def conduct(settings: Settings, folder: Path, note: Callable[[str], None]) -> DrillOutcome:
    """Run a drill in `folder`, an empty one, and check it. Nothing is left when it returns, raises or is cancelled.

    note: told what happens, a line each. Raises BadInput for settings that cannot be, StoreUnavailable without etcd,
    DeadlineExceeded where the cluster does not come up."""
    schedule = plan(settings.kinds, settings.length_s, settings.every_s, settings.seed)
    with DrillCluster(folder) as cluster:
        cluster.start(settings.controllers, settings.machines)
        observed = await _drilled(settings, cluster, schedule, note)
    left = invariants.nothing_left(
        [f"{process.pid} {' '.join(process.cmdline())}" for process in cluster.left_processes()],
        [str(path) for path in cluster.left_files()],
    )
    noticed = [observed.watch.noticed(hit) for hit in observed.hits]
    phase = pb.Phase.Name(observed.job.phase).removeprefix("PHASE_")
    return DrillOutcome(
        verdicts=(
            invariants.ended_well(phase, observed.job.reason, observed.job.restarts),
            invariants.outlasted(observed.trained_to_the_end, len(observed.missed)),
            invariants.all_up(observed.fallen),
            *([invariants.crowds_kept(observed.crowds)] if observed.crowds else []),
            *_of_strategy(settings, observed),
            left,
        ),
        recoveries=tuple(recoveries(observed.evidence, noticed)),
        missed=tuple(observed.missed),
        ratio=effective_ratio(observed.evidence, observed.began_s, observed.ended_s),
        step_s=median_step_s(observed.evidence, observed.began_s, observed.ended_s),
        length_s=observed.ended_s - observed.began_s,
        story=tuple(
            f"{e.unix_s:.3f} [{wire.event_kind(e)}] run {e.run}: {e.text}"
            for _, e in sorted(observed.watch.events.items())
        ),
    )


def _of_strategy(settings: Settings, observed: _Observed) -> list[InvariantResult]:
    begun = observed.evidence.begun
    samples = 1 + max((max(one.samples, default=-1) for one in begun), default=-1)
    if settings.strategy == "dense":
        undisturbed = observed.undisturbed or Evidence((), {})
        return invariants.of_dense(observed.evidence, settings.workers, samples, undisturbed)
    killed = sum(len(hit.victims) for hit in observed.hits if hit.strike.takes_workers)
    per_rank = max((len(one.samples) for one in begun), default=0)
    events = observed.watch.events.values()
    lost = [
        event.text
        for event in events
        if event.kind == common.EVENT_KIND_WORKER_NOTICE and "the residual of rank" in event.text
    ]
    return invariants.of_sparse(
        observed.evidence, settings.workers, samples, killed=killed, per_rank=per_rank, lost=lost
    )


async def _drilled(
    settings: Settings, cluster: DrillCluster, schedule: Sequence[Planned], note: Callable[[str], None]
) -> _Observed:
    watch = Watch(cluster.addresses)
    out, calm = cluster.evidence, cluster.folder / "calm"
    async with AsyncClient(list(cluster.addresses.values()), timeout_s=_LEADERLESS_S) as client:
        await training.ready(client, settings.machines)
        job = await training.submit(client, settings, out, checkpoints=True)
        watching = [
            asyncio.create_task(watch.lead(), name="who-leads"),
            asyncio.create_task(watch.follow(job), name="events"),
        ]
        try:
            await training.first_steps(client, job, watch)
            note(f"{job} trains on {settings.workers} of {settings.machines} machines: {len(schedule)} strikes follow")
            began_s = time.time()
            striker = Striker(cluster, lambda: watch.leader, settings.step_s)
            hits, missed = await _strikes(settings, striker, schedule, note)
            ended_s = time.time()
            outlasted = (await client.get(job)).phase not in ENDED
            fallen = cluster.fallen()
            note("the strikes are over; the rest is trained at full speed")
            if Strike.SAVING in {planned.strike for planned in schedule}:
                note("its last checkpoint meets a disk that takes its time")
                slow(out, _LAST_PIECE_S, training.epochs(settings) - 1)  # not those before it: a drill has hundreds
            (out / FULL_SPEED).touch()
            ended = await training.end(client, job)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(watching[1]), _READY_S)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
        for task in watching:
            if not task.cancelled():
                task.result()
        undisturbed = None
        if settings.strategy == "dense" and ended.phase == pb.PHASE_DONE:
            note("the same once more, undisturbed")
            calm.mkdir()
            (calm / FULL_SPEED).touch()
            overflow.repeat(out, calm)
            await training.end(client, await training.submit(client, settings, calm, checkpoints=False))
            undisturbed = evidence_.read(calm)
    return _Observed(
        evidence_.read(out),
        undisturbed,
        ended,
        hits,
        missed,
        watch,
        began_s,
        ended_s,
        outlasted,
        fallen,
        striker.crowds,
    )


async def _strikes(
    settings: Settings, striker: Striker, schedule: Sequence[Planned], note: Callable[[str], None]
) -> tuple[list[Hit], list[Planned]]:
    """All of them, each at its time, whether the one before is over or not. Returns when the drill's time is over."""
    began = time.monotonic()
    hits: list[Hit] = []
    missed: list[Planned] = []

    async def one(planned: Planned) -> None:
        await asyncio.sleep(max(0.0, began + planned.at_s - time.monotonic()))
        note(f"{planned.at_s:6.1f} s  {planned.strike}")
        found = await striker.strike(planned)
        hits.extend(found)
        if not found:
            missed.append(planned)

    async with asyncio.TaskGroup() as group:
        for planned in schedule:
            group.create_task(one(planned), name=f"strike at {planned.at_s:.1f} s")
        await asyncio.sleep(settings.length_s)
    return sorted(hits, key=lambda hit: hit.at_s), missed
