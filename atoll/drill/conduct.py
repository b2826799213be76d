"""One drill from its first process to its last, and what it found."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from atoll.bundle import pack
from atoll.client import ENDED, AsyncClient
from atoll.drill import evidence as evidence_
from atoll.drill import invariants
from atoll.drill.cluster import DrillCluster
from atoll.drill.evidence import Evidence
from atoll.drill.figures import Recovery, Struck, effective_ratio, median_step_s, recoveries
from atoll.drill.invariants import Verdict
from atoll.drill.recording import FULL_SPEED
from atoll.drill.schedule import Planned, Strike, plan
from atoll.drill.strikes import Hit, Striker
from atoll.drill.watch import Watch
from atoll.errors import DeadlineExceeded
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

OWN_SCRIPT: Final = Path(__file__).parent / "job" / "train.py"
_EPOCH_STEPS: Final = 50  # of the own script
_READY_S: Final = 60.0
_STUCK_S: Final = 120.0
"""A job without a new step for this long will not come back."""
_LEADERLESS_S: Final = 60.0
_LOOK_S: Final = 0.1
_FIRST_STEPS: Final = 5
"""Trained before the first strike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to drill."""

    length_s: float
    every_s: float
    seed: int
    machines: int
    workers: int
    """Fixed: as few as many. Fewer than machines: the others stand by."""

    controllers: int
    kinds: tuple[str, ...]
    strategy: Literal["dense", "stale-sparse"] = "dense"
    step_s: float = 0.1
    script: Path | None = None
    """The own one where None. It is given --out FOLDER --epochs N and writes with a Recorder."""

    epochs: int | None = None
    """Enough to outlast the drill; computed for the own script."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    verdicts: tuple[Verdict, ...]
    recoveries: tuple[Recovery, ...]
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
class _Seen:
    """What is known when the cluster still stands."""

    evidence: Evidence
    undisturbed: Evidence | None
    job: pb.Job
    hits: Sequence[Hit]
    missed: Sequence[Planned]
    watch: Watch
    began_s: float
    ended_s: float
    trained_to_the_end: bool


async def conduct(settings: Settings, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run a drill in `folder`, an empty one, and check it. Nothing is left when it returns, raises or is cancelled.

    say: told what happens, a line each. Raises BadInput for settings that cannot be, StoreUnavailable without etcd,
    DeadlineExceeded where the cluster does not come up."""
    schedule = plan(settings.kinds, settings.length_s, settings.every_s, settings.seed)
    with DrillCluster(folder) as cluster:
        cluster.start(settings.controllers, settings.machines)
        seen = await _drilled(settings, cluster, schedule, say)
    left = invariants.nothing_left(
        [f"{process.pid} {' '.join(process.cmdline())}" for process in cluster.left_processes()],
        [str(path) for path in cluster.left_files()],
    )
    struck = [_noticed(hit, seen.watch) for hit in seen.hits]
    phase = pb.Phase.Name(seen.job.phase).removeprefix("PHASE_")
    return Outcome(
        verdicts=(
            invariants.ended_well(phase, seen.job.reason, seen.job.restarts),
            invariants.outlasted(seen.trained_to_the_end, len(seen.missed)),
            *_of_strategy(settings, seen),
            left,
        ),
        recoveries=tuple(recoveries(seen.evidence, struck)),
        missed=tuple(seen.missed),
        ratio=effective_ratio(seen.evidence, seen.began_s, seen.ended_s),
        step_s=median_step_s(seen.evidence, seen.began_s, seen.ended_s),
        length_s=seen.ended_s - seen.began_s,
        story=tuple(f"{e.unix_s:.3f} [{e.kind}] run {e.run}: {e.text}" for _, e in sorted(seen.watch.events.items())),
    )


def _of_strategy(settings: Settings, seen: _Seen) -> list[Verdict]:
    begun = seen.evidence.begun
    samples = 1 + max((max(one.samples, default=-1) for one in begun), default=-1)
    if settings.strategy == "dense":
        assert seen.undisturbed is not None
        return invariants.of_dense(seen.evidence, settings.workers, samples, seen.undisturbed)
    killed = sum(len(hit.victims) for hit in seen.hits if hit.strike not in (Strike.LEADER, Strike.ETCD))
    per_rank = max((len(one.samples) for one in begun), default=0)
    return invariants.of_sparse(seen.evidence, settings.workers, samples, killed, per_rank)


async def _drilled(
    settings: Settings, cluster: DrillCluster, schedule: Sequence[Planned], say: Callable[[str], None]
) -> _Seen:
    watch = Watch(cluster.addresses)
    out, calm = cluster.folder / "out", cluster.folder / "calm"
    async with AsyncClient(list(cluster.addresses.values()), timeout_s=_LEADERLESS_S) as client:
        await _ready(client, settings.machines)
        job = await _submit(client, settings, out, checkpoints=True)
        watching = [
            asyncio.create_task(watch.lead(), name="who-leads"),
            asyncio.create_task(watch.follow(job), name="events"),
        ]
        try:
            await _first_steps(client, job, watch)
            say(f"{job} trains on {settings.workers} of {settings.machines} machines: {len(schedule)} strikes follow")
            began_s = time.time()
            hits, missed = await _strikes(settings, Striker(cluster, lambda: watch.leader), schedule, say)
            ended_s = time.time()
            outlasted = (await client.get(job)).phase not in ENDED
            say("the strikes are over; the rest is trained at full speed")
            (out / FULL_SPEED).touch()
            ended = await _end(client, job)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(watching[1]), _READY_S)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
        undisturbed = None
        if settings.strategy == "dense":
            say("the same once more, undisturbed")
            calm.mkdir()
            (calm / FULL_SPEED).touch()
            await _end(client, await _submit(client, settings, calm, checkpoints=False))
            undisturbed = evidence_.read(calm)
    return _Seen(evidence_.read(out), undisturbed, ended, hits, missed, watch, began_s, ended_s, outlasted)


async def _ready(client: AsyncClient, machines: int) -> None:
    ends_s = time.monotonic() + _READY_S
    while (connected := sum(node.connected for node in (await client.nodes()).nodes)) < machines:
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(f"{connected} of {machines} machines were connected within {_READY_S:g} s")
        await asyncio.sleep(_LOOK_S)


async def _submit(client: AsyncClient, settings: Settings, out: Path, *, checkpoints: bool) -> str:
    script = settings.script or OWN_SCRIPT
    bundle = pack(script)
    epochs = settings.epochs or math.ceil(settings.length_s / settings.step_s / _EPOCH_STEPS) + 2
    arguments = [f"--out={out}", f"--epochs={epochs}"]
    if settings.script is None:
        arguments.append(f"--step-s={settings.step_s}")
    spec = common.JobSpec(
        name="drill" if checkpoints else "undisturbed",
        script=bundle.script,
        args=arguments,
        min_workers=settings.workers,
        max_workers=settings.workers,
        checkpoint=common.CheckpointPolicy(
            every_steps=100 if checkpoints else 0, keep=2, memory_replicas=2 if checkpoints else 0
        ),
        max_restarts=3,
        split="even",  # another split is another order of sums: other bits
        seed=settings.seed,
        strategy=settings.strategy,
    )
    if settings.strategy == "stale-sparse":
        spec.stale_sparse.CopyFrom(common.StaleSparse(rate=0.9, digest_every=10))
    return await client.submit(spec, bundle.data)


async def _first_steps(client: AsyncClient, job: str, watch: Watch) -> None:
    ends_s = time.monotonic() + _READY_S
    while (seen := await client.get(job)).progress.step < _FIRST_STEPS or watch.leader is None:
        if time.monotonic() > ends_s or seen.phase in ENDED:
            said = " | ".join(event.text for event in watch.events.values())
            raise DeadlineExceeded(f"{job} did not train within {_READY_S:g} s: {said}")
        await asyncio.sleep(_LOOK_S)


async def _strikes(
    settings: Settings, striker: Striker, schedule: Sequence[Planned], say: Callable[[str], None]
) -> tuple[list[Hit], list[Planned]]:
    """All of them, each at its time, whether the one before is over or not. Returns when the drill's time is over."""
    began = time.monotonic()
    hits: list[Hit] = []
    missed: list[Planned] = []

    async def one(planned: Planned) -> None:
        await asyncio.sleep(max(0.0, began + planned.at_s - time.monotonic()))
        say(f"{planned.at_s:6.1f} s  {planned.strike}")
        found = await striker.strike(planned)
        hits.extend(found)
        if not found:
            missed.append(planned)

    async with asyncio.TaskGroup() as group:
        for planned in schedule:
            group.create_task(one(planned), name=f"strike at {planned.at_s:.1f} s")
        await asyncio.sleep(settings.length_s)
    return sorted(hits, key=lambda hit: hit.at_s), missed


async def _end(client: AsyncClient, job: str) -> pb.Job:
    """The job when it has ended, or when no step of it came for too long."""
    step = -1
    seen = await client.get(job)
    with suppress(TimeoutError):
        async with asyncio.timeout(_STUCK_S) as deadline:
            async for seen in client.watch(job):
                if seen.progress.step > step:
                    step = seen.progress.step
                    deadline.reschedule(asyncio.get_running_loop().time() + _STUCK_S)
    return seen


def _noticed(hit: Hit, watch: Watch) -> Struck:
    """With the time at which a controller said that something was lost, or at which another one led."""
    noticed_s: float | None = None
    if hit.strike in (Strike.LEADER, Strike.LEADER_STOP):
        noticed_s = next((at_s for at_s, name in watch.led if at_s > hit.at_s and name not in hit.victims), None)
    elif hit.strike is not Strike.ETCD:
        said = (event for _, event in sorted(watch.events.items()) if event.unix_s > hit.at_s)
        noticed_s = next((event.unix_s for event in said if event.kind == "worker"), None)
    return Struck(hit.strike, hit.at_s, hit.victims, noticed_s)
