"""Records of a job's safe state: the generation that is complete in memory, and how a recovery proceeds."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.jobs.etcd_record import EtcdRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(EtcdRecord):
    """The newest generation of which every shard of all ranks is complete in memory, with the copies that are due.

    shards: of view `view` of run `run`, whose placement says which machines hold them. step: the first that is not in
    it.
    """

    job: str
    run: int
    step: int
    shards: int
    unix_s: float
    view: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord(EtcdRecord):
    """How a job goes on after the loss of run `run`, written as it proceeds. It lies with the run that was lost, then
    with the one that replaces it, and is over with that one's first step.

    resize: it was stopped to grow or to shrink, and nobody was lost. lost: "rank 1 on b". joined: nodes of the next run
    that the lost one did not have. began_step, reached_step: steps that were done before the run, and with it. tier,
    step: what training went on from, as its workers say.

    Wall clocks, 0 where it has not come to that: seen_unix_s, the last sign of life of what was lost; detected_unix_s,
    the run was fenced; ended_unix_s, no process of it was left; launched_unix_s, the next one was decided;
    resumed_unix_s, its first step was done.
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
        """Done before, and done once more."""
        return max(self.reached_step - self.step, 0) if self.over else 0
