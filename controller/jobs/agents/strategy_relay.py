"""Messages between the workers of a run and the scheduler of its strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.controller.state.records import JobRecord, RunRecord
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import Scheduler, as_json, load, read
from atoll.v1 import agents_pb2, common_pb2

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Scheduled:
    run: int
    scheduler: Scheduler
    complained: bool = False


class StrategyRelay:
    """One scheduler a job, of its newest run. In memory only: a new leader begins with new ones."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Scheduled] = {}

    def answers(
        self, job: JobRecord, run: RunRecord, message: common_pb2.StrategyMessage, now_s: float
    ) -> Iterator[tuple[str, agents_pb2.ControllerMessage]]:
        """By node. A message of an older run, or one that its strategy does not know, has none."""
        strategy = registry.find(job.spec.strategy)
        if message.id.run != run.run or strategy.message is None or not strategy.scheduler:
            return
        known = self._jobs.get(job.id)
        if known is None or known.run < run.run:
            settings = strategy.settings.model_validate(dict(job.spec.strategy_settings))
            known = self._jobs[job.id] = _Scheduled(run.run, load(strategy.scheduler)(settings, len(run.members)))
        try:
            told = read(strategy.message, message.body, f"message of strategy {strategy.name}")
        except BadInput as error:
            if not known.complained:
                known.complained = True
                logger.warning("%s run %d rank %d: dropped: %s", job.id, run.run, message.id.rank, error)
            return
        for rank, answer in known.scheduler.heard(message.id.rank, told, now_s):
            id = common_pb2.WorkerId(job=job.id, run=run.run, rank=rank)
            wire = common_pb2.StrategyMessage(id=id, body=as_json(answer.said()))
            yield run.members[rank].node, agents_pb2.ControllerMessage(strategy=wire)

    def drop(self, job: str) -> None:
        self._jobs.pop(job, None)
