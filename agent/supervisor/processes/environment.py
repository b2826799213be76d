"""Environment variables of a worker: torchrun's, the agent's address, and the user's own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.agent.telemetry.devices import MIG, Device
from atoll.agent.telemetry.numa import NumaBinding
from atoll.v1.agents_pb2 import Launch

_PREFIX: Final = "ATOLL_"
SECRET: Final = "ATOLL_WORKER_SECRET"
"""Identifies the worker that a process belongs to, even after the process left its group."""
TORCHRUN_VARIABLES: Final = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    }
)
"""Variables that a job's `env` cannot change, like ATOLL_*: they give the worker its place in the run."""


_OF_EXEC: Final = ("PYTHON", "LD_")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Command and variables of a process. A prepared process serves only launches with an equal interpreter."""

    command: tuple[str, ...]
    """Command line up to the program."""
    env: Mapping[str, str]
    """All variables but those of the launch."""
    job: str
    """The job whose own variables and secrets are included; empty: none, so any job without own variables may use it.
    """


def can_wait(env: Mapping[str, str], own: Iterable[str]) -> bool:
    """Return True if a process may be executed before its launch. own: names of the variables that the job sets.

    False if the job configures the interpreter or the loader, or if modules are found relative to the working folder:
    these take effect at exec alone."""
    if any(name.startswith(_OF_EXEC) for name in own):
        return False
    path = env.get("PYTHONPATH")
    return not path or all(os.path.isabs(part) for part in path.split(os.pathsep))


def worker_environment(
    inherited: Mapping[str, str],
    own: Mapping[str, str],
    device: Device,
    devices: Sequence[Device],
    *,
    local_rank: int,
    interface: str | None,
    threads: int | None,
    binding: NumaBinding | None,
) -> dict[str, str]:
    """Return all variables of a worker but those of its launch.

    inherited: the agent's own; ATOLL_* (a token, for example) are left out. own: the job's. threads: of a worker's
    processor; None: its share of the NUMA node that it is bound to, or else of the machine's cores."""
    env = {name: value for name, value in inherited.items() if may_set(name)}
    env["PYTHONUNBUFFERED"] = "1"
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    else:  # as torch chooses, each worker would take all of them
        each = binding.threads if binding is not None else max(1, len(os.sched_getaffinity(0)) // len(devices))
        env.setdefault("OMP_NUM_THREADS", str(each))
    if interface is not None:
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = interface
    env |= {name: value for name, value in own.items() if may_set(name)}
    if device.kind == "cuda":
        env["ATOLL_DEVICE_KIND"] = device.kind
        if device.sharers > 1:
            env["ATOLL_DEVICE_SHARERS"] = str(device.sharers)
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order; CUDA's own puts the fastest first
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices(device, devices, local_rank))
        # torch.cuda.is_available() otherwise starts CUDA, after which no adapter can hide the other workers' GPUs.
        env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return env


def launch_variables(launch: Launch, device: Device, *, agent_socket: str, secret: str) -> dict[str, str]:
    """Return the variables that name this worker and this start of it. On a MIG part torchrun's LOCAL_RANK is 0:
    torchrun scripts take cuda:LOCAL_RANK, and CUDA shows the process that part alone."""
    id = launch.id
    last = launch.HasField("joins") or launch.HasField("helping")  # their rank numbers are no positions
    return {
        "RANK": str(launch.world_size - 1 if last else id.rank),
        "LOCAL_RANK": "0" if device.visible_as.startswith(MIG) else str(launch.local_rank),
        "GROUP_RANK": str(launch.node_rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
        "TORCHELASTIC_RUN_ID": id.job,
        "TORCHELASTIC_RESTART_COUNT": str(id.run - 1),
        "ATOLL_AGENT_SOCKET": agent_socket,
        "ATOLL_JOB": id.job,
        "ATOLL_RUN": str(id.run),
        "ATOLL_RANK": str(id.rank),
        "ATOLL_LOCAL_RANK": str(launch.local_rank),
        SECRET: secret,
    }


def visible_devices(device: Device, devices: Sequence[Device], local_rank: int) -> list[str]:
    """Return GPUs in an order that has `device` at position local_rank: torchrun scripts take cuda:LOCAL_RANK.

    The list is as short as possible: one GPU for the first worker of a node. CUDA shows a process only the first MIG
    part, so a worker on one gets no others."""
    if device.visible_as.startswith(MIG):
        return [device.visible_as]
    others = [other.visible_as for other in devices if other.kind == "cuda" and other != device]
    return [*others[:local_rank], device.visible_as]


def may_set(name: str) -> bool:
    """Return True if agent and job may set this variable of a worker."""
    return name not in TORCHRUN_VARIABLES and not name.startswith(_PREFIX)
