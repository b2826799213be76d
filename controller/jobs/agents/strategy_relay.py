"""Messages between the workers of a run and the scheduler of its strategy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from atoll.controller.state.records import JobRecord, RunRecord
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import Declared, Scheduler, as_json, load, read
from atoll.v1 import agents_pb2, common_pb2

logger = logging.getLogger(__name__)

Answer = tuple[str, agents_pb2.ControllerMessage]


@dataclass(slots=True)
class _Scheduled:
    run: RunRecord
    scheduler: Scheduler
    complained: bool = False

    def wire(self, answers: Iterable[tuple[int, Declared]]) -> Iterator[Answer]:
        for rank, answer in answers:
            id = common_pb2.WorkerId(job=self.run.job, run=self.run.run, rank=rank)
            wire = common_pb2.StrategyMessage(id=id, body=as_json(answer.said()))
            yield self.run.members[rank].node, agents_pb2.ControllerMessage(strategy=wire)


class StrategyRelay:
    """One scheduler a job, of its newest run. In memory only: a new leader begins with new ones."""

    def __init__(self, notice: Callable[[str, int, str], None]) -> None:
        """notice: tells the events of a job's run something."""
        self._notice: Final = notice
        self._jobs: dict[str, _Scheduled] = {}
        self._heard = asyncio.Event()  # something may be due sooner than `run` waits for

    def answers(
        self, job: JobRecord, run: RunRecord, message: common_pb2.StrategyMessage, now_s: float
    ) -> Iterator[Answer]:
        """Yield answers by node. A message of an older run, or unknown to its strategy, gets none."""
        strategy = registry.find(job.spec.strategy)
        if message.id.run != run.run or strategy.message is None or not strategy.scheduler:
            return
        known = self._jobs.get(job.id)
        if known is None or known.run.run < run.run:
            settings = strategy.settings.model_validate(dict(job.spec.strategy_settings))
            known = self._jobs[job.id] = _Scheduled(run, load(strategy.scheduler)(settings))
        known.run = run
        try:
            told = read(strategy.message, message.body, f"message of strategy {strategy.name}")
        except BadInput as error:
            if not known.complained:
                known.complained = True
                logger.warning("%s run %d rank %d: dropped: %s", job.id, run.run, message.id.rank, error)
            return
        yield from known.wire(known.scheduler.heard(message.id.rank, told, now_s))
        self._tell(known, now_s)
        self._heard.set()

    async def run(self, send: Callable[[str, agents_pb2.ControllerMessage], None]) -> None:
        """Gives the answers that become due with time, until cancelled."""
        while True:
            for node, answer in self._passed(time.monotonic()):
                send(node, answer)
            self._heard.clear()
            dues = [one.scheduler.due_s for one in self._jobs.values()]
            due_s = min((each for each in dues if each is not None), default=None)
            try:
                async with asyncio.timeout(None if due_s is None else max(due_s - time.monotonic(), 0.0)):
                    await self._heard.wait()
            except TimeoutError:
                pass

    def drop(self, job: str) -> None:
        self._jobs.pop(job, None)

    def _passed(self, now_s: float) -> Iterator[Answer]:
        for one in list(self._jobs.values()):
            due_s = one.scheduler.due_s
            if due_s is not None and due_s <= now_s:
                yield from one.wire(one.scheduler.passed(now_s))
                self._tell(one, now_s)

    def _tell(self, one: _Scheduled, now_s: float) -> None:
        for text in one.scheduler.take_notices(now_s):
            self._notice(one.run.job, one.run.run, text)
