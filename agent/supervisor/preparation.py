"""Prepare a worker's files before its process starts: its job's code, and the job's environment if it has one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.agent.supervisor.environments.code_store import CodeStore, Fetch, find_script
from atoll.agent.supervisor.environments.store import EnvironmentStore
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import JobSpec

LOOK_S: Final = 10.0
"""Interval in which scripts' folders are looked at, in seconds."""
_NOT_THE_SCRIPTS: Final = frozenset({"__pycache__"})


def written_since(folder: Path, since_s: float) -> str | None:
    """Return a file that a script wrote beside its code, where jobs share that folder and old ones are deleted: a file
    below `folder` written after this wall-clock time, relative to it, or None."""
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_THE_SCRIPTS]
        for name in names:
            path = os.path.join(where, name)
            try:
                if os.lstat(path).st_mtime > since_s:
                    return os.path.relpath(path, folder)
            except OSError:
                continue  # it is gone again
    return None


def _warning(written: str) -> str:
    return (
        f"the script wrote {written} beside its code. All jobs with the same code share that folder, and it is deleted "
        "when it is old. Write to an absolute path, or take the model out of a checkpoint with `atoll export`"
    )


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
            await asyncio.sleep(LOOK_S)
            self._told &= {key.job for key in self._prepared}
            for key in list(self._prepared):
                await self.look(key, notify)

    async def look(self, key: WorkerKey, notify: Callable[[WorkerKey, str], None]) -> None:
        """Check one worker's code folder."""
        prepared = self._prepared.get(key)
        if prepared is None or key.job in self._told:
            return
        written = await asyncio.to_thread(written_since, prepared.code, prepared.since_s)
        if written is not None and key in self._prepared and key.job not in self._told:
            self._told.add(key.job)
            notify(key, _warning(written))

    async def close(self) -> None:
        await self._environments.close()
        await self._code.close()

    def _environments_in_use(self) -> set[str]:
        return {each.environment.name for each in self._prepared.values() if each.environment is not None}
