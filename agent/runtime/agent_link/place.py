"""Reads from the environment, once, which worker of which job this process is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import BadInput, SettingError

_HINT = "It is set by torchrun and by Atoll's agent; unset RANK and WORLD_SIZE to train alone"


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """Address of the agent that started this worker."""

    socket: str  # ZeroMQ endpoint, ipc://...
    job: str
    run: int
    rank: int  # in its run, for good
    secret: str
    has_gpu: bool = False  # the agent announced a GPU for it
    gpu_sharers: int = 1  # agents that share that GPU

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> AgentEndpoint | None:
        """None where no agent started this process. Raises BadInput."""
        socket = env.get("ATOLL_AGENT_SOCKET")
        if not socket:
            return None
        if not socket.startswith("ipc://"):
            raise SettingError("ATOLL_AGENT_SOCKET", socket, "is not ipc://PATH", "Only Atoll's agent sets it")
        missing = [name for name in ("ATOLL_JOB", "ATOLL_RUN", "ATOLL_WORKER_SECRET") if not env.get(name)]
        if missing:
            raise BadInput(f"ATOLL_AGENT_SOCKET is set but {', '.join(missing)} is not; only Atoll's agent sets them")
        rank = _number(env, "ATOLL_RANK" if "ATOLL_RANK" in env else "RANK") if "RANK" in env else 0
        secret, has_gpu = env["ATOLL_WORKER_SECRET"], env.get("ATOLL_DEVICE_KIND") == "cuda"
        sharers = _number(env, "ATOLL_DEVICE_SHARERS") if "ATOLL_DEVICE_SHARERS" in env else 1
        return AgentEndpoint(socket, env["ATOLL_JOB"], _number(env, "ATOLL_RUN"), rank, secret, has_gpu, sharers)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Place of this worker among the workers of its run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    agent: AgentEndpoint | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> WorkerPlace:
        """Read the place from the environment. Without RANK and WORLD_SIZE it is a run of one worker. Raises
        BadInput naming the variable."""
        agent = AgentEndpoint.from_environment(env)
        if "RANK" not in env and "WORLD_SIZE" not in env:
            if agent is not None:
                raise BadInput("ATOLL_AGENT_SOCKET is set but RANK is not; only Atoll's agent sets them")
            return WorkerPlace(0, 1, 0, 1, "127.0.0.1", None)
        rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        if not rank < world_size:
            raise SettingError("RANK", rank, f"must be below WORLD_SIZE = {world_size}", _HINT)
        if world_size > 1:
            _number(env, "MASTER_PORT")
            if not env.get("MASTER_ADDR"):
                raise SettingError("MASTER_ADDR", "", "must name rank 0's machine", _HINT)
        said = next((name for name in ("ATOLL_LOCAL_RANK", "LOCAL_RANK") if name in env), "RANK")
        local_rank = _number(env, said)
        local_size = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world_size
        if not local_rank < local_size:
            raise SettingError(said, local_rank, f"must be below LOCAL_WORLD_SIZE = {local_size}", _HINT)
        return WorkerPlace(rank, world_size, local_rank, local_size, env.get("MASTER_ADDR", "127.0.0.1"), agent)


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise SettingError(name, value, "is not a whole number of at least 0", _HINT)
    return int(value)
