"""Workers that train one conformance case after the other, and the agents that each case's runs belong to."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Final

from cases import CHANGED_STEP, LOST, STRATEGIES, Case
from held_ports import free_port
from program import Outcome
from scheduled_runs import Scheduling
from zmq_agent import FakeAgent, Start, Worker

from atoll.strategies.declaration import as_json
from atoll.strategies.groups.settings import Groups
from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_TRAINING

WORKER: Final = Path(__file__).parent / "case_worker.py"
CASE_DEADLINE_S: Final = 60.0
STOPPED_FROM: Final = 1
"""The step from which the first run of a case that resumes is asked to stop."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank's program raised."""

    kind: str
    text: str
    traceback: str


Ended = Outcome | Failed | None


class CaseHung(Exception):
    """A rank did not answer in time."""


class WorkerPool:
    """Owns the worker processes. A case that hangs costs the workers, which are started anew for the next."""

    def __init__(self, start: Start, directory: Path) -> None:
        self._start, self._directory = start, directory
        self._numbers = itertools.count()
        self._workers: list[tuple[Worker, Connection]] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    def run(self, case: Case) -> Sequence[Ended]:
        """Train the case. Returns what each rank ended with; of a case that resumes, its second run's."""
        folder = Path(tempfile.mkdtemp(dir=self._directory, prefix=f"{next(self._numbers)}-"))
        ended: Sequence[Ended] = ()
        for number in (1, 2) if case.event == "resume" else (1,):
            ended = self._run(case, number, folder)
        return ended

    def _run(self, case: Case, number: int, folder: Path) -> Sequence[Ended]:
        name, settings = STRATEGIES[case.strategy]
        with FakeAgent(folder, run=number, world_size=case.world_size) as agent, ExitStack() as stack:
            if name == "groups":
                stack.enter_context(Scheduling(agent, Groups(**settings)))
            agent.spec.strategy, agent.spec.strategy_settings = name, as_json(dict(settings))
            agent.spec.seed = 1
            agent.makes_views = case.event == LOST
            agent.saves = case.event == "resume"
            agent.shares = case.shares
            agent.place(
                [f"n{rank}" for rank in range(case.world_size)], [f"i{rank}" for rank in range(case.world_size)]
            )
            if case.event == "plan-change":
                agent.later_plans = [agent.plan(2, CHANGED_STEP, (3.0, 1.0))]
            port = free_port()
            connections = [connection for _, connection in self._ready(case.world_size)]
            for rank, connection in enumerate(connections):
                connection.send_bytes(pickle.dumps((case, number, agent.environment(rank, port))))
            if case.event == "resume" and number == 1:
                while not _all_reached(agent, STOPPED_FROM) and not wait(connections, timeout=0.02):
                    pass  # until all have come so far, or one has ended before
                for rank in range(case.world_size):
                    agent.send_stop(rank)
            if case.event == LOST:
                self._lose_last(agent, connections)
            return [self._answer(case, connection) for connection in connections]

    def _lose_last(self, agent: FakeAgent, connections: list[Connection]) -> None:
        """Wait until the last worker has died, and let the others go on without it."""
        left = range(len(connections) - 1)
        if connections[-1] not in wait(connections, timeout=CASE_DEADLINE_S):
            return  # another ended before, or none did
        connections.pop().close()
        self._workers.pop()[0].wait(timeout=30)
        while not all(agent.stands_at(rank) == (1, VIEW_STAGE_BROKEN) for rank in left):
            if wait(connections, timeout=0.01):
                return  # it says why
        agent.send_view(2, left, (1.0,) * len(left), plan_id=2)
        while not all(agent.stands_at(rank) == (2, VIEW_STAGE_TRAINING) for rank in left):
            if wait(connections, timeout=0.01):
                return
        agent.put_in_force()

    def _answer(self, case: Case, connection: Connection) -> Ended:
        if not connection.poll(CASE_DEADLINE_S):
            self._end()
            raise CaseHung(f"{case}: a rank did not end within {CASE_DEADLINE_S:.0f} s")
        try:
            answer = pickle.loads(connection.recv_bytes())  # noqa: S301 - what the test's own worker sent
        except (EOFError, ConnectionResetError):
            self._end()
            return Failed("worker", "its process ended", "")
        return Failed(*answer) if isinstance(answer, tuple) else answer

    def _ready(self, count: int) -> Sequence[tuple[Worker, Connection]]:
        if len(self._workers) < count:
            self._begin(range(len(self._workers), count))
        return self._workers[:count]

    def _begin(self, ranks: Sequence[int]) -> None:
        address = str(self._directory / f"pool-{next(self._numbers)}.sock")
        with Listener(address, family="AF_UNIX") as listener:
            processes, found = [], {}
            for rank in ranks:
                with (self._directory / f"rank-{rank}.log").open("ab") as log:
                    command = [sys.executable, str(WORKER), address, str(rank)]
                    processes.append(self._start(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log))
            for _ in ranks:
                connection = listener.accept()
                found[int(connection.recv_bytes())] = connection
        self._workers += [(process, found[rank]) for rank, process in zip(ranks, processes, strict=True)]

    def _end(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
        self._workers = []


def _all_reached(agent: FakeAgent, step: int) -> bool:
    return all(agent.alive.get(rank, (0, 0))[0] >= step for rank in range(agent.world_size))
