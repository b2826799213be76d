"""Has here what a worker needs before its process is made: its job's code, and the environment that a job may have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.agent.supervisor import code_writes
from atoll.agent.supervisor.code import CodeStore, Fetch, find_script
from atoll.agent.supervisor.environments.store import EnvironmentStore
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import JobSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    code: Path
    """The folder that the worker runs in."""
    environment: Path | None
    """None: the agent's own."""
    since_s: float
    """Wall clock, as files have it."""


class Preparation:
    """On the event loop. Keeps what workers use until each is released."""

    def __init__(self, state_dir: Path, fetch: Fetch) -> None:
        """Raises OSError where the state directory cannot be used."""
        self._code = CodeStore(state_dir / "code", fetch)
        self._environments = EnvironmentStore(state_dir / "environments", state_dir / "pids")
        self._wanted: dict[WorkerKey, str] = {}
        self._prepared: dict[WorkerKey, Prepared] = {}
        self._told: set[str] = set()

    async def prepare(self, key: WorkerKey, spec: JobSpec, tell: Callable[[str], None]) -> None:
        """Then `of` has it. tell: people, what happens. Raises AtollError, OSError with the cause."""
        self._wanted[key] = spec.code_sha256
        code = await self._code.get(spec.code_sha256, self._wanted.values)
        find_script(code, spec.script)
        environment = await self._environments.get(spec, code, self._environments_in_use, tell)
        self._prepared[key] = Prepared(code, environment, time.time())

    def of(self, key: WorkerKey) -> Prepared:
        return self._prepared[key]

    def release(self, key: WorkerKey) -> None:
        self._wanted.pop(key, None)
        self._prepared.pop(key, None)

    async def watch(self, tell: Callable[[WorkerKey, str], None]) -> None:
        """Tell of scripts that write beside their code, once a job, until cancelled."""
        while True:
            await asyncio.sleep(code_writes.LOOK_S)
            self._told &= {key.job for key in self._prepared}
            for key in list(self._prepared):
                await self.look(key, tell)

    async def look(self, key: WorkerKey, tell: Callable[[WorkerKey, str], None]) -> None:
        """At one worker's."""
        prepared = self._prepared.get(key)
        if prepared is None or key.job in self._told:
            return
        written = await asyncio.to_thread(code_writes.written_since, prepared.code, prepared.since_s)
        if written is not None and key in self._prepared and key.job not in self._told:
            self._told.add(key.job)
            tell(key, code_writes.warning(written))

    async def close(self) -> None:
        await self._environments.close()
        await self._code.close()

    def _environments_in_use(self) -> set[str]:
        return {each.environment.name for each in self._prepared.values() if each.environment is not None}
