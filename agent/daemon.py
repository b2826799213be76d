"""The agent: one per machine. Keeps its workers alive and a stream to the controller open."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from atoll.agent.controller_stream import ControllerStream, PendingReports
from atoll.agent.supervisor.machine import Worker
from atoll.agent.supervisor.owner import OwnersLimits
from atoll.agent.supervisor.processes.leftover_processes import end_leftovers
from atoll.agent.supervisor.settings import AgentSettings
from atoll.agent.supervisor.shell import Supervisor
from atoll.agent.telemetry.devices import Device, find_devices
from atoll.agent.telemetry.gauges import Sampler, gauges_of
from atoll.agent.telemetry.shared_gpu import lock_files
from atoll.agent.telemetry.work import measured
from atoll.errors import BadInput, Conflict
from atoll.telemetry.prometheus import Measured, Measurement, exposed

logger = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 1.0


CONNECTED: Final = Measurement("atoll_agent_connected", "Whether a controller that leads is connected")
DEVICES: Final = Measurement("atoll_agent_devices", "Devices of this node")
WORKERS: Final = Measurement("atoll_agent_workers", "Workers of this node by phase", ("phase",))
WORKER_STEP: Final = Measurement("atoll_agent_worker_step", "Steps completed", ("job", "rank"))


def measures(*, connected: bool, devices: int, workers: Sequence[Worker]) -> Iterator[Measured]:
    """Yield the agent's metrics."""
    yield CONNECTED, float(connected), ()
    yield DEVICES, devices, ()
    for phase, count in sorted(Counter(worker.phase.name.lower() for worker in workers).items()):
        yield WORKERS, count, (phase,)
    for worker in workers:
        yield WORKER_STEP, worker.step, (worker.key.job, str(worker.key.rank))


async def serve(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Run until `stop` is set; then workers are stopped in stages. When this returns, nothing it started is alive.

    Raises NotAllowed (wrong token or certificate) and Conflict (name or state directory in use by another agent);
    BadInput where the state directory or the certificate's files cannot be used, or there is no GPU to share. Any other
    trouble with controllers is waited out."""
    if settings.tls is not None:
        settings.tls.read()
    with _state_directory(settings.state_dir):
        end_leftovers(settings.state_dir / "pids")
        found = find_devices(settings.speed, settings.share_gpu)
        with lock_files(found) as files:
            devices = await measured(found, settings.threads, stop, files)
            logger.info("%s has %s", settings.name, ", ".join(f"{d.kind} {d.index}: {d.model}" for d in devices))
            with Sampler(gauges_of(devices)) as sampler:
                while not stop.is_set():
                    await settings.owner.until_help(stop)
                    if not stop.is_set():
                        await _serve(settings, devices, sampler, stop)


async def _serve(settings: AgentSettings, devices: Sequence[Device], sampler: Sampler, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, or until the machine's owner needs it."""
    pending = PendingReports()
    stream = ControllerStream(settings, devices, pending, sampler.take)
    supervisor = Supervisor(
        settings, devices, stream.fetch_code, changed=pending.worker_changed, printed=pending.output_came
    )
    try:
        async with exposed(
            settings.metrics,
            lambda: measures(connected=stream.connected, devices=len(devices), workers=list(supervisor.workers)),
        ):
            await _run(supervisor, stream, settings.owner, stop)
    finally:
        await supervisor.close()


async def _run(supervisor: Supervisor, stream: ControllerStream, owner: OwnersLimits, stop: asyncio.Event) -> None:
    supervising = asyncio.create_task(supervisor.run(), name="supervisor")
    streaming = asyncio.create_task(stream.run(supervisor), name="controller stream")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    resting = asyncio.create_task(owner.until_rest(), name="owner")
    tasks = (supervising, streaming, stopping, resting)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if supervising not in done:
            asked = "its agent was asked to end" if stop.is_set() else "its agent was refused"
            await supervisor.stop_all(resting.result() if resting in done else asked)
            await stream.flush(_LAST_WORDS_S)
        for work in (streaming, supervising):
            if work.done():
                work.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _state_directory(folder: Path) -> Iterator[None]:
    """Make the folder and hold it for this agent alone. Raises BadInput, Conflict."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "pids").mkdir(exist_ok=True)
        fd = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(f"state directory {folder} cannot be used: {error.strerror}. Give --state-dir") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise Conflict(f"another agent uses {folder}. Stop it, or give this one another --state-dir") from error
    finally:
        os.close(fd)
