"""Messages between the workers of a run and the scheduler of its strategy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from atoll.controller.jobs.model.strategy_in_force import declared
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state.records import RunRecord
from atoll.strategies.declaration import Declared, Scheduler, as_json, load
from atoll.v1 import agents_pb2, common_pb2

Answer = tuple[str, agents_pb2.ControllerMessage]


@dataclass(slots=True)
class _Scheduled:
    run: RunRecord
    scheduler: Scheduler

    def wire(self, answers: Iterable[tuple[int, Declared]]) -> Iterator[Answer]:
        for rank, answer in answers:
            id = common_pb2.WorkerId(job=self.run.job, run=self.run.run, rank=rank)
            wire = common_pb2.StrategyMessage(id=id, body=as_json(answer.said()))
            yield self.run.members[rank].node, agents_pb2.ControllerMessage(strategy=wire)


class StrategyRelay:
    """One scheduler a job, of its newest run. In memory only: a new leader begins with new ones."""

    def __init__(self, notice: Callable[[str, int, str], None]) -> None:
        """notice: writes an event of a job's run."""
        self._notice: Final = notice
        self._jobs: dict[str, _Scheduled] = {}
        self._received = asyncio.Event()  # an answer may be due sooner than `run` waits for

    def answers(self, state: JobState, rank: int, message: Declared, now_s: float) -> Iterator[Answer]:
        """Yield the scheduler's answers to a message of the job's newest run, by node."""
        job, run = state.job, state.run
        strategy, settings = declared(job, state.strategy)
        if run is None or not strategy.scheduler:
            return
        known = self._jobs.get(job.id)
        if known is None or known.run.run < run.run:
            known = self._jobs[job.id] = _Scheduled(run, load(strategy.scheduler)(settings))
        known.run = run
        yield from known.wire(known.scheduler.heard(rank, message, now_s))
        self._report(known, now_s)
        self._received.set()

    async def run(self, send: Callable[[str, agents_pb2.ControllerMessage], None]) -> None:
        """Send the answers that become due with time, until cancelled."""
        while True:
            for node, answer in self._passed(time.monotonic()):
                send(node, answer)
            self._received.clear()
            dues = [one.scheduler.due_s for one in self._jobs.values()]
            due_s = min((each for each in dues if each is not None), default=None)
            try:
                async with asyncio.timeout(None if due_s is None else max(due_s - time.monotonic(), 0.0)):
                    await self._received.wait()
            except TimeoutError:
                pass

    def drop(self, job: str) -> None:
        self._jobs.pop(job, None)

    def _passed(self, now_s: float) -> Iterator[Answer]:
        for one in list(self._jobs.values()):
            due_s = one.scheduler.due_s
            if due_s is not None and due_s <= now_s:
                yield from one.wire(one.scheduler.passed(now_s))
                self._report(one, now_s)

    def _report(self, one: _Scheduled, now_s: float) -> None:
        for text in one.scheduler.take_notices(now_s):
            self._notice(one.run.job, one.run.run, text)
