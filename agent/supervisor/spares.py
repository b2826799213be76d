"""Fork servers, one for each device: processes that have imported what workers import, and fork one for each launch.

A server is made for what its device was last used for, or before that for a job without variables of its own. Nobody's
code runs in it. A worker that finds none is started without, or is one that is about to be a server; the next one is
made when that worker trains, so that importing takes no processor from a recovery; with the lowest priority, where that
can be undone."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.agent.memory_limits import available_bytes
from atoll.agent.runtime.warm_start import LaunchOrder
from atoll.agent.supervisor.fork_server import ForkServer
from atoll.agent.supervisor.interpreter import Interpreter
from atoll.agent.supervisor.machine import Phase, Worker
from atoll.agent.supervisor.process import WorkerProcess
from atoll.jobs.worker_key import WorkerKey

logger = logging.getLogger(__name__)

SPARE_BYTES: Final = 350 << 20
"""Resident in a process that waits: torch 2.13 for CPUs, measured 326 MB."""
LEAST_FREE_BYTES: Final = 4 * SPARE_BYTES
"""None is made where less is available; one that waits is ended below half of it."""
REST_S: Final = 5.0
"""From the agent's registration to its first: a job that waits starts before. And from the first steps of who was
started on the device last, or its end: a run that begins or goes on has the processor, a short job pays for none."""
PLAIN_S: Final = 60.0
"""A worker that tells of no steps is left alone for so long."""
KEPT_S: Final = 30.0
"""A job's own variables are kept for so long after its last worker here: it starts again within that, or is over."""
POLITE_S: Final = 5.0
"""It imports with the lowest priority for so long: where others leave no processor, it would never be ready."""
_BACKOFF_S: Final = (1.0, 600.0)
_LOOK_S: Final = 1.0
_TRIED_S: Final = 1.0


@dataclass(slots=True)
class DeviceSpare:
    """One device: what waits there, and for whom the next one is made."""

    wanted: Interpreter
    due_s: float
    user: WorkerKey | None = None
    """Who was started on the device last, until it trains or is gone."""
    used_s: float = 0.0
    """When a worker of `wanted.job` was here last."""
    failures: int = 0
    polite_until_s: float = math.inf
    server: ForkServer | None = None


def is_due(slot: DeviceSpare, workers: Mapping[WorkerKey, Worker], now_s: float) -> bool:
    """Whether to make one: not while who was started on the device last is on its way to its first step, nor at once
    after it."""
    if slot.user is not None:
        worker = workers.get(slot.user)
        if worker is None or worker.phase is Phase.EXITED or worker.progress.steps_s:
            slot.user, slot.due_s = None, max(slot.due_s, now_s + REST_S)
        elif not worker.greeted and now_s >= slot.due_s + PLAIN_S:
            slot.user = None
    return slot.user is None and now_s >= slot.due_s


def backoff_s(failures: int) -> float:
    """Until one that ended by itself is made again."""
    first_s, longest_s = _BACKOFF_S
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 20))


class Spares:
    """Owns what waits, on the event loop: until it is taken, ends by itself, or `close`."""

    def __init__(self, pids: Path) -> None:
        """pids: the folder of pid files."""
        self._pids = pids
        self._idle: Mapping[int, Interpreter] = {}
        self._slots: dict[int, DeviceSpare] = {}
        self._living: set[ForkServer] = set()
        self._enabled = importlib.util.find_spec("torch") is not None
        self._lowers = self._enabled and _priority_can_be_restored()
        self._looked_s = 0.0

    def open(self, idle: Mapping[int, Interpreter], now_s: float) -> None:
        """By device, what is waited with where nobody's is wanted. Said again where the agent's address may be another
        one."""
        self._idle = idle
        for device, interpreter in idle.items():
            slot = self._slots.setdefault(device, DeviceSpare(interpreter, now_s + REST_S))
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
        """A worker, by the server of its device. None: start it without, and the next server is made for that. wanted:
        None where none can have imported before."""
        slot, now_s = self._slots.get(device), time.monotonic()
        if slot is None:
            return None
        slot.user, slot.due_s, slot.used_s, slot.failures = key, now_s, now_s, 0
        if wanted is None:
            return None
        slot.wanted = wanted
        if (server := slot.server) is None:
            return None
        if server.made != wanted:
            self._end(slot)
            return None
        if self._lowers:
            _restore_priority(server.process.pid)
        try:
            if server.ready:
                return server.fork(order, secret=secret, pid_file=pid_file, on_exit=on_exit)
            slot.server = None
            begun = server.become(order, secret=secret, pid_file=pid_file, on_exit=on_exit)
            self._living.discard(server)
            return begun
        except OSError as error:
            logger.warning("a worker is started without the process that has imported for it: %s", error)
            server.kill()
            return None

    def tick(self, now_s: float, workers: Mapping[WorkerKey, Worker]) -> None:
        """Make what is due, end what is of no use any more."""
        jobs = {key.job for key, worker in workers.items() if worker.phase is not Phase.EXITED}
        for device, slot in self._slots.items():
            if slot.wanted.job in jobs:
                slot.used_s = now_s
            elif slot.wanted.job and now_s - slot.used_s > KEPT_S:
                slot.wanted = self._idle[device]
            if slot.server is None:
                continue
            if slot.server.made != slot.wanted:
                self._end(slot)
            elif now_s >= slot.polite_until_s:
                slot.polite_until_s = math.inf
                _restore_priority(slot.server.process.pid)
        if self._enabled and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._use_memory(now_s, workers, available_bytes())

    def _use_memory(self, now_s: float, workers: Mapping[WorkerKey, Worker], free_bytes: int) -> None:
        for device, slot in self._slots.items():
            if slot.server is not None and free_bytes < LEAST_FREE_BYTES // 2:
                self._end(slot)
            elif slot.server is None and free_bytes >= LEAST_FREE_BYTES and is_due(slot, workers, now_s):
                self._make(device, slot, now_s)
                free_bytes -= SPARE_BYTES

    def forget(self, job: str) -> None:
        """The job is over: what waits with its variables is ended."""
        for device, slot in self._slots.items():
            if slot.wanted.job == job:
                slot.wanted = self._idle[device]

    def close(self) -> None:
        """End all; make none any more."""
        self._slots.clear()
        living, self._living = self._living, set()
        for server in living:
            server.kill()
        for server in living:
            server.reap()

    def _make(self, device: int, slot: DeviceSpare, now_s: float) -> None:
        try:
            server = ForkServer(slot.wanted, pids=self._pids, device=device, on_exit=lambda: self._exited(slot, server))
        except OSError as error:
            self._failed(slot, now_s, str(error))
            return
        slot.server = server
        self._living.add(server)
        if self._lowers:
            slot.polite_until_s = now_s + POLITE_S
            with suppress(ProcessLookupError):
                os.sched_setscheduler(server.process.pid, os.SCHED_IDLE, os.sched_param(0))

    def _end(self, slot: DeviceSpare) -> None:
        assert slot.server is not None
        slot.server.kill()  # it is reaped when it is gone
        slot.server = None

    def _exited(self, slot: DeviceSpare, server: ForkServer) -> None:
        self._living.remove(server)
        code = server.reap()
        if slot.server is server:
            slot.server = None
            self._failed(slot, time.monotonic(), f"it ended with {code}")

    def _failed(self, slot: DeviceSpare, now_s: float, why: str) -> None:
        slot.failures += 1
        slot.due_s = now_s + backoff_s(slot.failures)
        logger.debug("no process waits for launches: %s. The next one in %g s", why, backoff_s(slot.failures))


def _priority_can_be_restored() -> bool:
    """Whether this user may take back SCHED_IDLE; tried on a thread that ends at once, since many may not."""
    allowed: list[bool] = []

    def attempt() -> None:
        try:
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                os.sched_setscheduler(0, policy, os.sched_param(0))
            allowed.append(True)
        except OSError:
            pass

    thread = threading.Thread(target=attempt, name="atoll-priority")
    thread.start()
    thread.join(_TRIED_S)
    return bool(allowed)


def _restore_priority(pid: int) -> None:
    """Of all its threads: the first one first, which makes the others."""
    with suppress(ProcessLookupError, FileNotFoundError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setscheduler(int(name), os.SCHED_OTHER, os.sched_param(0))
