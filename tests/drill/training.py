"""The job of a drill, as its user sees it: submitted, waited for, ended."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from atoll.client.client import ENDED, AsyncClient
from atoll.errors import DeadlineExceeded
from atoll.jobs.code_bundle import pack
from atoll.strategies.declaration import as_json
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb
from drill.settings import Settings
from drill.watch import Watch

_SCRIPT: Final = Path(__file__).parent / "job" / "train.py"
_EPOCH_STEPS: Final = 50
_TESTS: Final = Path(__file__).resolve().parent.parent
_READY_S: Final = 60.0
_STUCK_S: Final = 120.0
"""A job without a new step for this long will not come back."""
_LOOK_S: Final = 0.1
_FIRST_STEPS: Final = 5
"""Trained before the first strike."""


async def ready(client: AsyncClient, machines: int) -> None:
    ends_s = time.monotonic() + _READY_S
    while (connected := sum(node.connected for node in (await client.nodes()).nodes)) < machines:
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(f"{connected} of {machines} machines were connected within {_READY_S:g} s")
        await asyncio.sleep(_LOOK_S)


def epochs(settings: Settings) -> int:
    """Return how many epochs of the script outlast the strikes."""
    return math.ceil(settings.length_s / settings.step_s / _EPOCH_STEPS) + 2


async def submit(client: AsyncClient, settings: Settings, out: Path, *, checkpoints: bool) -> str:
    bundle = pack(_SCRIPT)
    spec = common.JobSpec(
        name="drill" if checkpoints else "undisturbed",
        script=bundle.script,
        args=[f"--out={out}", f"--epochs={epochs(settings)}", f"--step-s={settings.step_s}"],
        env={"PYTHONPATH": str(_TESTS)},  # for drill.recording
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
        spec.strategy_settings = as_json({"sparsity": 0.9, "digest_every": 10})
    return await client.submit(spec, bundle.data)


async def first_steps(client: AsyncClient, job: str, watch: Watch) -> None:
    ends_s = time.monotonic() + _READY_S
    while (seen := await client.get(job)).progress.step < _FIRST_STEPS or watch.leader is None:
        if time.monotonic() > ends_s or seen.phase in ENDED:
            said = " | ".join(event.text for event in watch.events.values())
            raise DeadlineExceeded(f"{job} did not train within {_READY_S:g} s: {said}")
        await asyncio.sleep(_LOOK_S)


async def end(client: AsyncClient, job: str) -> pb.Job:
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
