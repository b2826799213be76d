"""Measurements of an agent for Prometheus; those of its devices and jobs are the controller's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from atoll.agent.supervisor.machine import Worker
from atoll.telemetry.prometheus import Measured, Measurement

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
