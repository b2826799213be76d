"""Fork servers, one for each device: processes that have imported the workers' modules, and fork one for each launch.

A server is made for the last use of its device, or at first for a job without own variables. It runs no user code. A
worker that comes while there is none, or while it still imports, is started afresh. The next server is made once that
worker trains, so that imports take no processor from a recovery."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.agent.runtime.api.warm_start import LaunchOrder
from atoll.agent.supervisor.machine import Phase, Worker
from atoll.agent.supervisor.processes.environment import Interpreter
from atoll.agent.supervisor.processes.fork_server import ForkServer
from atoll.agent.supervisor.processes.process import WorkerProcess
from atoll.host.memory_limits import available_bytes
from atoll.jobs.worker_key import WorkerKey

logger = logging.getLogger(__name__)

FORK_SERVER_BYTES: Final = 350 << 20
"""Resident memory of a fork server: torch 2.13 for CPUs, measured 326 MB."""
LEAST_FREE_BYTES: Final = 4 * FORK_SERVER_BYTES
"""No server is made with less memory available; one is ended below half of it."""
QUIET_BEFORE_IMPORT_S: Final = 5.0
"""Seconds from the agent's registration, a worker's first step or its end to the next server. A run that begins or
resumes has the processor, and a short job pays for none."""
NO_HELLO_S: Final = 60.0
"""Seconds after which a worker that reports no steps no longer delays the next server."""
KEEP_JOB_VARIABLES_S: Final = 30.0
"""Seconds for which a job's own variables are kept after its last worker here, for a restart."""
_BACKOFF_S: Final = (1.0, 600.0)
_LOOK_S: Final = 1.0


@dataclass(slots=True)
class DeviceForkServer:
    """One device: its server, and the interpreter of the next one."""

    wanted: Interpreter
    due_s: float
    user: WorkerKey | None = None
    """Last worker that was started on the device, until it trains or ends."""
    used_s: float = 0.0
    """Time at which a worker of `wanted.job` was last here."""
    failures: int = 0
    server: ForkServer | None = None


def is_due(slot: DeviceForkServer, workers: Mapping[WorkerKey, Worker], now_s: float) -> bool:
    """Return True once the device's last worker trains or has ended, and QUIET_BEFORE_IMPORT_S have passed."""
    if slot.user is not None:
        worker = workers.get(slot.user)
        if worker is None or worker.phase is Phase.EXITED or worker.progress.steps_s:
            slot.user, slot.due_s = None, max(slot.due_s, now_s + QUIET_BEFORE_IMPORT_S)
        elif not worker.greeted and now_s >= slot.due_s + NO_HELLO_S:
            slot.user = None
    return slot.user is None and now_s >= slot.due_s


def backoff_s(failures: int) -> float:
    """Return the delay before a server that ended by itself is made again."""
    first_s, longest_s = _BACKOFF_S
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 20))


class ForkServers:
    """Owner of the fork servers, on the event loop: until one is taken, ends by itself, or `close`."""

    def __init__(self, pids: Path) -> None:
        """pids: the folder of pid files."""
        self._pids = pids
        self._idle: Mapping[int, Interpreter] = {}
        self._slots: dict[int, DeviceForkServer] = {}
        self._living: set[ForkServer] = set()
        self._enabled = importlib.util.find_spec("torch") is not None
        self._looked_s = 0.0

    def open(self, idle: Mapping[int, Interpreter], now_s: float) -> None:
        """Set the interpreter of each device that no job claims. Call it again when the agent's address may have
        changed."""
        self._idle = idle
        for device, interpreter in idle.items():
            slot = self._slots.setdefault(device, DeviceForkServer(interpreter, now_s + QUIET_BEFORE_IMPORT_S))
            if not slot.wanted.job:
                slot.wanted = interpreter

    def start(
        self,
        device: int,
        wanted: Interpreter | None,
        key: WorkerKey,
        order: LaunchOrder,
        *,
        secret: str,
        pid_file: Path,
        on_exit: Callable[[], None],
    ) -> WorkerProcess | None:
        """Start a worker by its device's server. None: start it without; the next server is made for `wanted`. wanted:
        None if no process can have imported for it."""
        slot, now_s = self._slots.get(device), time.monotonic()
        if slot is None:
            return None
        slot.user, slot.due_s, slot.used_s, slot.failures = key, now_s, now_s, 0
        if wanted is None:
            return None
        slot.wanted = wanted
        if (server := slot.server) is None:
            return None
        if server.made != wanted or not server.ready:
            self._end(slot)
            return None
        try:
            return server.fork(order, secret=secret, pid_file=pid_file, on_exit=on_exit)
        except OSError as error:
            logger.warning("a worker is started without the process that has imported for it: %s", error)
            server.kill()
            return None

    def tick(self, now_s: float, workers: Mapping[WorkerKey, Worker]) -> None:
        """Make servers that are due, end those of no use."""
        jobs = {key.job for key, worker in workers.items() if worker.phase is not Phase.EXITED}
        for device, slot in self._slots.items():
            if slot.wanted.job in jobs:
                slot.used_s = now_s
            elif slot.wanted.job and now_s - slot.used_s > KEEP_JOB_VARIABLES_S:
                slot.wanted = self._idle[device]
            if slot.server is not None and slot.server.made != slot.wanted:
                self._end(slot)
        if self._enabled and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._use_memory(now_s, workers, available_bytes())

    def _use_memory(self, now_s: float, workers: Mapping[WorkerKey, Worker], free_bytes: int) -> None:
        for device, slot in self._slots.items():
            if slot.server is not None and free_bytes < LEAST_FREE_BYTES // 2:
                self._end(slot)
            elif slot.server is None and free_bytes >= LEAST_FREE_BYTES and is_due(slot, workers, now_s):
                self._make(device, slot, now_s)
                free_bytes -= FORK_SERVER_BYTES

    def forget(self, job: str) -> None:
        """End the server with the variables of a finished job."""
        for device, slot in self._slots.items():
            if slot.wanted.job == job:
                slot.wanted = self._idle[device]

    def close(self) -> None:
        """End all servers; make none any more."""
        self._slots.clear()
        living, self._living = self._living, set()
        for server in living:
            server.kill()
        for server in living:
            server.reap()

    def _make(self, device: int, slot: DeviceForkServer, now_s: float) -> None:
        try:
            server = ForkServer(slot.wanted, pids=self._pids, device=device, on_exit=lambda: self._exited(slot, server))
        except OSError as error:
            self._failed(slot, now_s, str(error))
            return
        slot.server = server
        self._living.add(server)

    def _end(self, slot: DeviceForkServer) -> None:
        assert slot.server is not None
        slot.server.kill()  # it is reaped when it is gone
        slot.server = None

    def _exited(self, slot: DeviceForkServer, server: ForkServer) -> None:
        self._living.remove(server)
        code = server.reap()
        if slot.server is server:
            slot.server = None
            self._failed(slot, time.monotonic(), f"it ended with {code}")

    def _failed(self, slot: DeviceForkServer, now_s: float, why: str) -> None:
        slot.failures += 1
        slot.due_s = now_s + backoff_s(slot.failures)
        logger.debug("no process waits for launches: %s. The next one in %g s", why, backoff_s(slot.failures))
