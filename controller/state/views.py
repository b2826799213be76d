"""The record of a view: one membership of a run (docs/membership.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.jobs.etcd_record import EtcdRecord


class ViewState(StrEnum):
    PROPOSED = "PROPOSED"
    FORMING = "FORMING"
    IN_FORCE = "IN_FORCE"
    ABANDONED = "ABANDONED"


class ViewCause(StrEnum):
    """Reason of a view's proposal."""

    LAUNCH = "LAUNCH"  # it is the run's first
    LOSS = "LOSS"  # a member was lost
    BROKEN = "BROKEN"  # all members lost touch, and none is lost; or the view before did not come about
    JOIN = "JOIN"  # a worker is ready to be taken in
    STRATEGY = "STRATEGY"  # its members go on by another strategy
    LEAVE = "LEAVE"  # a worker is to leave: the run is faster without it, or its node is drained


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRecord(EtcdRecord):
    """One view of run `run`. ranks: its members by position; `has_state`: those whose state counts.

    wanted: so many workers the run is meant to have; where it has fewer, others join. keeps_unsent: at the
    boundary each keeps what it has not sent, and who leaves takes it along. lost, joined:
    "rank 1 on b", against the last view in force. plan: the id of its first plan. at_boundary: it is gone to from a
    step boundary. step: the one that it began with, once it is in force. why: of its present state. strategy: the one
    by which its members train; empty: the job's own (records of older versions). previous_strategy: the one that they
    leave for it, where it is another.

    Wall clocks, for people, 0 where it has not come to that: seen_unix_s, the last sign of life of what was lost, or
    when a joiner was ready; proposed_unix_s, forming_unix_s, in_force_unix_s, its states; stepped_unix_s, its first
    step was heard of.
    """

    job: str
    run: int
    view: int
    state: ViewState
    cause: ViewCause
    reason: str
    ranks: tuple[int, ...]
    has_state: tuple[int, ...]
    master_address: str
    master_port: int
    plan: int
    wanted: int
    strategy: str = ""
    previous_strategy: str = ""
    at_boundary: bool = False
    keeps_unsent: bool = False
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    step: int = 0
    why: str = ""
    seen_unix_s: float = 0.0
    proposed_unix_s: float = 0.0
    forming_unix_s: float = 0.0
    in_force_unix_s: float = 0.0
    stepped_unix_s: float = 0.0
