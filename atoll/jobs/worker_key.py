"""The identity of a worker, for controller and agent alike."""

from __future__ import annotations

from typing import NamedTuple

from atoll.v1.common_pb2 import WorkerId


class WorkerKey(NamedTuple):
    """The worker of one rank in one run of a job. Ordered: by job, then run, then rank."""

    job: str
    run: int
    rank: int

    def __str__(self) -> str:
        return f"{self.job} run {self.run} rank {self.rank}"

    @staticmethod
    def of(id: WorkerId) -> WorkerKey:
        return WorkerKey(id.job, id.run, id.rank)

    def to_wire(self) -> WorkerId:
        return WorkerId(job=self.job, run=self.run, rank=self.rank)
