"""Cache of the environments of jobs on this node: built once for equal recipes; the newest few are kept."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from atoll.agent.supervisor.environments.building import Building, Recipe, agent_digest, is_whole, recipe_of
from atoll.agent.supervisor.environments.code_store import delete, retire
from atoll.agent.supervisor.processes.environment import may_set
from atoll.network.message_limits import SHA256
from atoll.v1.common_pb2 import JobSpec

MAX_ENVIRONMENTS: Final = 4
MAX_BUILDS: Final = 4
"""Concurrent builds; further ones wait."""
_CACHES: Final = {"UV_CACHE_DIR": "uv", "PIP_CACHE_DIR": "pip"}


@dataclass(slots=True)
class _InTheMaking:
    building: Building
    result: asyncio.Future[Path]
    waiters: int = 0


class EnvironmentStore:
    """Environments at folder/DIGEST. Owns its threads."""

    def __init__(self, folder: Path, pids: Path) -> None:
        """pids: the folder of pid files. Raises OSError."""
        self._folder = folder
        self._pids = pids
        self._making: dict[str, _InTheMaking] = {}
        self._threads = ThreadPoolExecutor(MAX_BUILDS, thread_name_prefix="atoll-environment")
        folder.mkdir(parents=True, exist_ok=True)
        for each in folder.iterdir():
            if each.name.startswith(".") or (SHA256.fullmatch(each.name) and not is_whole(each)):
                shutil.rmtree(each, ignore_errors=True)

    async def get(
        self, spec: JobSpec, code: Path, in_use: Callable[[], Collection[str]], notify: Callable[[str], None]
    ) -> Path | None:
        """Return the environment's folder; None if the job needs none. Concurrent calls for one recipe share the build,
        which is stopped when no caller waits any more.

        code: the job's. in_use: names of folders that are kept. notify: called with sentences for the user. Raises
        EnvironmentFailed with the cause, NotFound without an installer, OSError."""
        if not spec.requirements and not spec.setup:
            return None
        loop = asyncio.get_running_loop()
        recipe = recipe_of(spec, await loop.run_in_executor(self._threads, agent_digest))
        while (making := self._making.get(recipe.digest)) is not None and making.building.stopped.is_set():
            await asyncio.wait([making.result])
        if making is None:
            if is_whole(folder := self._folder / recipe.digest):
                os.utime(folder)
                return folder
            making = self._begin(recipe, spec, code, in_use)
            notify("builds the job's own environment; the next run reuses it")
        making.waiters += 1
        try:
            return await asyncio.shield(making.result)
        finally:
            making.waiters -= 1
            if not making.waiters:
                making.building.stopped.set()

    async def close(self) -> None:
        making = list(self._making.values())
        for each in making:
            each.building.stopped.set()
        await asyncio.gather(*(each.result for each in making), return_exceptions=True)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, recipe: Recipe, spec: JobSpec, code: Path, in_use: Callable[[], Collection[str]]) -> _InTheMaking:
        own = {**os.environ, **spec.env, **spec.secrets}
        env = {name: value for name, value in own.items() if may_set(name)}
        for name, folder in _CACHES.items():
            env.setdefault(name, str(self._folder / "downloads" / folder))
        building = Building(self._folder / recipe.digest, self._pids / f"environment-{recipe.digest[:16]}.pid", env)
        loop = asyncio.get_running_loop()
        result = loop.run_in_executor(self._threads, building.make, recipe, code)
        making = self._making[recipe.digest] = _InTheMaking(building, result)
        result.add_done_callback(partial(self._made, recipe.digest, in_use))
        return making

    def _made(self, digest: str, in_use: Callable[[], Collection[str]], result: asyncio.Future[Path]) -> None:
        making = set(self._making)
        del self._making[digest]
        if result.cancelled() or result.exception() is not None:
            return
        # Renamed on the event loop, which also gives folders to workers. Only deletion takes long.
        doomed = retire(self._folder, MAX_ENVIRONMENTS, {*in_use(), *making})
        self._threads.submit(delete, doomed)
