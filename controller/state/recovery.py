"""Records of a job's safe state: the generation that is complete in memory, and how a recovery proceeds."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.jobs.etcd_record import EtcdRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(EtcdRecord):
    """The newest generation of which every shard of all ranks, with its copies, is complete in memory.

    shards: of view `view` of run `run`, whose placement names the machines that have them. step: the first step that is
    not in it.
    """

    job: str
    run: int
    step: int
    shards: int
    unix_s: float
    view: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord(EtcdRecord):
    """Progress of a job's recovery from the loss of run `run`, written as it proceeds.

    The lost run's record has it first, then that of the run that replaces it; it is over with that run's first step.
    resize: the run was stopped to grow or to shrink, and no worker was lost. lost: "rank 1 on b". joined: nodes of the
    next run that the lost one did not have. began_step, reached_step: steps that were done before the run, and at its
    end. tier, step: the checkpoint that training resumed from, as its workers report.

    Wall clocks, 0 until it happened: seen_unix_s, the last sign of life of what was lost; detected_unix_s, the run was
    fenced; ended_unix_s, no process of it was left; launched_unix_s, the next run was decided; resumed_unix_s, its
    first step was done.
    """

    run: int
    cause: str
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    reached_step: int = 0
    seen_unix_s: float
    detected_unix_s: float
    ended_unix_s: float = 0.0
    launched_unix_s: float = 0.0
    resumed_unix_s: float = 0.0
    tier: str = ""
    step: int = 0
    resize: bool = False
    began_step: int = 0

    @property
    def over(self) -> bool:
        return self.resumed_unix_s > 0

    @property
    def steps_lost(self) -> int:
        """Steps that were done before and are done again."""
        return max(self.reached_step - self.step, 0) if self.over else 0
