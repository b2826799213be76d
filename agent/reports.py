"""Messages in which the agent tells a controller about itself and its workers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from atoll.agent.links.link_probe import LinkProbe
from atoll.agent.supervisor.machine import Phase, Worker
from atoll.agent.supervisor.memory import MemoryFolders
from atoll.agent.supervisor.settings import AgentSettings
from atoll.agent.supervisor.shard_server import ShardServer
from atoll.agent.telemetry.devices import Device
from atoll.host.memory_limits import total_bytes
from atoll.network.message_limits import MAX_REASON, PROTOCOL
from atoll.v1 import common_pb2
from atoll.v1.agents_pb2 import Register

_STATES: Final = {
    Phase.FETCHING: common_pb2.WORKER_STATE_STARTING,
    Phase.WAITING: common_pb2.WORKER_STATE_STARTING,
    Phase.STARTING: common_pb2.WORKER_STATE_STARTING,
    Phase.RUNNING: common_pb2.WORKER_STATE_RUNNING,
    Phase.STOPPING: common_pb2.WORKER_STATE_STOPPING,
    Phase.EXITED: common_pb2.WORKER_STATE_EXITED,
}


def host_id(boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """The same for all agents under one kernel, in whatever containers: they fail together. Empty where it is not
    known."""
    try:
        return hashlib.blake2b(boot_id.read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def status_of(worker: Worker) -> common_pb2.WorkerStatus:
    status = common_pb2.WorkerStatus(
        id=worker.key.to_wire(),
        state=_STATES[worker.phase],
        pid=worker.pid,
        uses_atoll=worker.greeted,
        step=worker.step,
        plan=worker.plan,
        trained=worker.trained,
        view=worker.view,
        volunteer_port=worker.volunteer_port,
    )
    if worker.exit is not None:
        status.exit_code = worker.exit.code
        status.exit_kind = common_pb2.ExitKind.Value(f"EXIT_KIND_{worker.exit.kind.name}")
        status.reason = " ".join(worker.exit.reason.split())[:MAX_REASON]
        status.overflow_batch = worker.local_batch if worker.exit.out_of_memory else 0
    return status


def register(
    settings: AgentSettings,
    session: str,
    *,
    address: str,
    devices: Sequence[Device],
    ports: Sequence[int],
    workers: Sequence[Worker],
    memory: MemoryFolders,
    shards: ShardServer,
    links: LinkProbe,
) -> Register:
    return Register(
        name=settings.name,
        session=session,
        island=settings.island,
        address=address,
        memory_bytes=total_bytes(),
        devices=[
            common_pb2.Device(
                index=d.index,
                kind=d.kind,
                model=d.model,
                memory_bytes=d.memory_bytes,
                speed=d.speed,
                work_per_s=d.work_per_s,
                uuid=d.uuid,
                sharers=d.sharers,
            )
            for d in devices
        ],
        rendezvous_ports=ports,
        workers=[status_of(worker) for worker in workers],
        token=settings.token,
        protocol=PROTOCOL,
        unix_s=time.time(),
        version=version("atoll"),
        memory_jobs=memory.jobs,
        checkpoint_memory_bytes=memory.most_bytes(),
        shards_port=shards.port,
        shards_key=shards.public_key,
        host=host_id(),
        rack=settings.rack,
        volunteer=settings.volunteer,
        behind_nat=settings.behind_nat,
        links_port=links.port,
        links_secret=links.secret,
    )
