"""Prepare a worker's files before its process starts: its job's code, and the job's environment if it has one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.agent.supervisor.environments import code_writes
from atoll.agent.supervisor.environments.code_store import CodeStore, Fetch, find_script
from atoll.agent.supervisor.environments.store import EnvironmentStore
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import JobSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    code: Path
    """Working folder of the worker."""
    environment: Path | None
    """Folder of the job's environment; None: the agent's own."""
    since_s: float
    """Wall-clock time of the preparation, to compare with times of files."""


class Preparation:
    """Prepared files of all workers, kept until each is released. On the event loop."""

    def __init__(self, state_dir: Path, fetch: Fetch) -> None:
        """Raises OSError if the state directory cannot be used."""
        self._code = CodeStore(state_dir / "code", fetch)
        self._environments = EnvironmentStore(state_dir / "environments", state_dir / "pids")
        self._wanted: dict[WorkerKey, str] = {}
        self._prepared: dict[WorkerKey, Prepared] = {}
        self._told: set[str] = set()

    async def prepare(self, key: WorkerKey, spec: JobSpec, notify: Callable[[str], None]) -> None:
        """Fetch the code and build the environment; then `of` returns them. notify: called with sentences for the user.
        Raises AtollError, OSError with the cause."""
        self._wanted[key] = spec.code_sha256
        code = await self._code.get(spec.code_sha256, self._wanted.values)
        find_script(code, spec.script)
        environment = await self._environments.get(spec, code, self._environments_in_use, notify)
        self._prepared[key] = Prepared(code, environment, time.time())

    def of(self, key: WorkerKey) -> Prepared:
        return self._prepared[key]

    def release(self, key: WorkerKey) -> None:
        self._wanted.pop(key, None)
        self._prepared.pop(key, None)

    async def watch(self, notify: Callable[[WorkerKey, str], None]) -> None:
        """Warn of scripts that write beside their code, once a job, until cancelled."""
        while True:
            await asyncio.sleep(code_writes.LOOK_S)
            self._told &= {key.job for key in self._prepared}
            for key in list(self._prepared):
                await self.look(key, notify)

    async def look(self, key: WorkerKey, notify: Callable[[WorkerKey, str], None]) -> None:
        """Check one worker's code folder."""
        prepared = self._prepared.get(key)
        if prepared is None or key.job in self._told:
            return
        written = await asyncio.to_thread(code_writes.written_since, prepared.code, prepared.since_s)
        if written is not None and key in self._prepared and key.job not in self._told:
            self._told.add(key.job)
            notify(key, code_writes.warning(written))

    async def close(self) -> None:
        await self._environments.close()
        await self._code.close()

    def _environments_in_use(self) -> set[str]:
        return {each.environment.name for each in self._prepared.values() if each.environment is not None}
