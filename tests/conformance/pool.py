"""Workers that train one conformance case after the other, and the agents that each case's runs belong to."""

from __future__ import annotations

import itertools
import os
import pickle
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Final

import events
from cases import CHANGED_STEP, STRATEGIES, Case
from held_ports import free_port
from program import Outcome
from scheduled_runs import Scheduling
from zmq_agent import FakeAgent, Start, Worker

from atoll.strategies.declaration import as_json
from atoll.strategies.groups.settings import Groups
from atoll.v1.common_pb2 import ViewStage

WORKER: Final = Path(__file__).parent / "case_worker.py"
CASE_DEADLINE_S: Final = 60.0
STOCK: Final = threading.Lock()
"""Pools of several threads start workers from one stock of processes."""


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
        """Train the case. Returns what each rank ended with; of a case of two runs, the second one's."""
        folder = Path(tempfile.mkdtemp(dir=self._directory, prefix=f"{next(self._numbers)}-"))
        ended: Sequence[Ended] = ()
        for number in range(1, case.runs + 1):
            ended = self._run(case, number, folder)
            if any(isinstance(one, Failed) for one in ended):
                break
            assert number == case.runs or not any(ended), f"{case}: its first run was not stopped"
        return ended

    def _run(self, case: Case, number: int, folder: Path) -> Sequence[Ended]:
        name, settings = STRATEGIES[case.strategy]
        again = number == 2 and case.starts_again
        workers = case.world_size - 1 if again else case.world_size
        with FakeAgent(folder, run=number, world_size=workers) as agent, ExitStack() as stack:
            if name == "groups":
                stack.enter_context(Scheduling(agent, Groups(**settings)))
            agent.spec.strategy, agent.spec.strategy_settings = name, as_json(dict(settings))
            agent.spec.seed = 1
            agent.makes_views = case.event in {"lost", "join", "raises"}
            agent.saves = case.runs > 1
            agent.volunteers.secret = secrets.token_bytes(32) if case.event == "helped" else b""
            agent.shares = (1.0,) * workers if again else case.shares
            places = range(case.processes)
            agent.place([f"n{place}" for place in places], [f"i{place}" for place in places])
            if case.event == "plan-change":
                agent.later_plans = [agent.plan(2, CHANGED_STEP, (3.0, 1.0))]
            port = free_port()
            arrived = [folder / f"arrived-{number}-{rank}" for rank in range(case.processes)]
            connections = [connection for _, connection in self.ready(workers if again else case.processes)]
            volunteer = connections.pop() if case.event == "helped" else None
            for rank, connection in enumerate(connections):
                environment = agent.environment(rank, port) if rank < workers else agent.joiner_environment(rank)
                connection.send_bytes(pickle.dumps((case, number, environment, arrived[rank])))
            if volunteer is not None and events.takes_help(agent, connections):
                environment = agent.volunteer_environment(workers, 0)
                volunteer.send_bytes(pickle.dumps((case, number, environment, arrived[workers])))
                ended = self._answers(case, (*connections, volunteer), agent)
                return ended if ended[-1] is not None else ended[:-1]
            if case.event == "resume" and number == 1:
                events.stop(agent, connections, arrived)
            elif case.event == "raises":
                events.stop_broken(agent, connections)
            elif case.event == "join":
                events.admit(agent, connections, arrived[:workers])
            elif case.event == "lost" and not again and self._last_has_died(connections):
                events.form_without_last(agent, connections, at_boundary=case.by_rounds)
            return self._answers(case, connections, agent)

    def _last_has_died(self, connections: list[Connection]) -> bool:
        """Wait until the last worker has died. Returns False where another's case ended before, or none did."""
        if connections[-1] not in wait(connections, timeout=CASE_DEADLINE_S):
            return False
        connections.pop().close()
        with STOCK:
            self._workers.pop()[0].wait(timeout=30)
        return True

    def _answers(self, case: Case, connections: Iterable[Connection], agent: FakeAgent) -> list[Ended]:
        """Wait for what each worker ended with. Raises CaseHung."""
        ended: list[Ended] = []
        for connection in connections:
            if not connection.poll(CASE_DEADLINE_S):
                raise self._hung(case, ended, agent)
            ended.append(self._answer(connection))
        return ended

    def _hung(self, case: Case, ended: Sequence[Ended], agent: FakeAgent) -> CaseHung:
        """Describe the case with what may be its cause: how lower ranks ended, and what each reported of its views."""
        self._end()
        failed = [f"rank {rank} ended before: {one}" for rank, one in enumerate(ended) if not isinstance(one, Outcome)]
        stages = [
            f"rank {rank}: view {one.view} {ViewStage.Name(one.stage)} {one.reason}"
            for rank, reports in sorted(agent.stands.items())
            for one in reports
        ]
        logs = [f"{log.name}: {log.read_text()}" for log in sorted(self._directory.glob("rank-*.log"))]
        text = "\n".join([*failed, *stages, *logs])
        return CaseHung(f"{case}: rank {len(ended)} did not end within {CASE_DEADLINE_S:.0f} s\n{text}")

    def _answer(self, connection: Connection) -> Ended:
        try:
            answer = pickle.loads(connection.recv_bytes())  # noqa: S301 - what the test's own worker sent
        except (EOFError, ConnectionResetError):
            self._end()
            return Failed("worker", "its process ended", "")
        return Failed(*answer) if isinstance(answer, tuple) else answer

    def ready(self, count: int) -> Sequence[tuple[Worker, Connection]]:
        """Start what is missing of so many workers. Returns them."""
        if len(self._workers) < count:
            with STOCK:
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
        with STOCK:
            for process, connection in self._workers:
                connection.close()
                with suppress(ProcessLookupError):  # one that has just ended by itself
                    process.send_signal(signal.SIGKILL)
                process.wait(timeout=30)
        self._workers = []
