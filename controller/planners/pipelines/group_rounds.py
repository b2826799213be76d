"""Form groups of replicas that average together, from their ready signals.

SDPipe (Miao et al., 2023), Algorithm 2 and sections 3.3 and 3.4. A state and an event make the next state and the
groups that were formed; time is an argument. Planner `groups` replays it, the scheduler of strategy `groups` runs
it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from atoll.errors import BadInput

Cause = Literal["all ready", "window over", "connects", "not validated", "partners ready"]
"""Cause of a group: all live replicas are ready; the window ended and the groups connect; after a wait they connect;
the window ended while another stage waits, so that it was not checked; all replicas of a rule without windows are
ready."""


@dataclass(frozen=True, slots=True)
class RoundGroup:
    """Replicas of a stage that average together. waited_s: seconds since the first ready signal. held_s: seconds of it
    between the window's end and the connection; awaited: the replica whose signal or departure ended this wait.
    widened_s: seconds of it in the window beyond its usual end."""

    stage: int
    formed_s: float
    members: tuple[int, ...]
    cause: Cause
    waited_s: float = 0.0
    held_s: float = 0.0
    awaited: int | None = None
    widened_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageRounds:
    """State of one stage. live: replicas that the groups must connect. returning: those of them without the stage's
    mean yet.

    recent: the newest groups, at most history - 1."""

    live: frozenset[int]
    returning: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    since_s: float = 0.0  # the first of `ready`
    window_ends_s: float | None = None  # None: no window is open
    recent: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupRounds:
    """State of all stages. waiting: the one stage that waits until its groups connect, since waiting_since_s.

    Meanwhile no other stage is checked: two stages that wait for each other's pipelines would wait for ever (section
    3.4)."""

    history: int
    stages: tuple[StageRounds, ...]
    waiting: int | None = None
    waiting_since_s: float = 0.0

    @staticmethod
    def of(stages: int, replicas: int, history: int) -> GroupRounds:
        """Return the first state. history: this many consecutive groups of a stage connect all its live replicas. With
        1 all average together in each round. Raises BadInput."""
        if min(stages, replicas, history) < 1:
            raise BadInput(f"stages = {stages}, replicas = {replicas} and history = {history} must be at least 1")
        return GroupRounds(history, (StageRounds(frozenset(range(replicas))),) * stages)

    @property
    def due_s(self) -> float | None:
        """Time at which the next window ends; call `passed` then."""
        return min((s.window_ends_s for s in self.stages if s.window_ends_s is not None), default=None)

    def connects(self, stage: int) -> bool:
        """Return whether the ready replicas and the newest groups connect the stage. A replica counts once all its
        stages have their means again: otherwise one stage would wait for it, and it for another stage."""
        here = self.stages[stage]
        returning = frozenset[int]().union(*(each.returning for each in self.stages))
        return connected((*here.recent, here.ready), here.live - returning)


Outcome = tuple[GroupRounds, list[RoundGroup]]
NOTHING: Final[frozenset[int]] = frozenset()


def ready(rounds: GroupRounds, stage: int, replica: int, now_s: float, window_s: float) -> Outcome:
    """Handle a replica's ready signal after its local update. A repeated signal changes nothing. Raises BadInput for
    one that departed."""
    here = rounds.stages[stage]
    if replica not in here.live:
        raise BadInput(f"replica {replica} of stage {stage} is none of {sorted(here.live)}. It has to return first")
    if replica in here.ready:
        return rounds, []
    since_s = here.since_s if here.ready else now_s
    here = replace(here, ready=here.ready | {replica}, since_s=since_s)
    if here.window_ends_s is None and rounds.waiting != stage:
        here = replace(here, window_ends_s=now_s + window_s)
    return _examined(_put(rounds, stage, here), stage, replica, now_s)


def passed(rounds: GroupRounds, now_s: float) -> Outcome:
    """Close windows that ended by now, in the order in which they ended."""
    groups: list[RoundGroup] = []
    while (due_s := rounds.due_s) is not None and due_s <= now_s:
        stage = next(at for at, each in enumerate(rounds.stages) if each.window_ends_s == due_s)
        rounds, formed = window_over(rounds, stage, now_s)
        groups += formed
    return rounds, groups


def window_over(rounds: GroupRounds, stage: int, now_s: float) -> Outcome:
    """End the window of a stage: the ready replicas average, or wait for more."""
    here = replace(rounds.stages[stage], window_ends_s=None)
    rounds = _put(rounds, stage, here)
    if here.ready <= here.returning:
        return rounds, []  # nobody among them has the stage's mean: they go with the next one who does
    if rounds.connects(stage):
        return _formed(rounds, stage, now_s, "window over")
    if rounds.waiting is None:
        return replace(rounds, waiting=stage, waiting_since_s=now_s), []
    return _formed(rounds, stage, now_s, "not validated")


def departed(rounds: GroupRounds, stage: int, replica: int, now_s: float) -> Outcome:
    """Remove a replica: no stage waits for it, and the groups need not connect it."""
    here = rounds.stages[stage]
    gone = frozenset({replica})
    here = replace(here, live=here.live - gone, ready=here.ready - gone, returning=here.returning - gone)
    if not here.ready:
        here = replace(here, window_ends_s=None)
    rounds = _put(rounds, stage, here)
    if rounds.waiting == stage and not here.ready:
        rounds = replace(rounds, waiting=None, waiting_since_s=0.0)
    return _examined(rounds, stage, replica, now_s)


def returned(rounds: GroupRounds, stage: int, replica: int) -> GroupRounds:
    """Add a replica that had departed. It averages with others before it trains alone, and so gets their mean."""
    here = rounds.stages[stage]
    if replica in here.live:
        return rounds
    alone = not here.live
    back = frozenset({replica})
    returning = NOTHING if alone else here.returning | back  # of a stage that nobody holds there is no mean
    return _put(rounds, stage, replace(here, live=here.live | back, returning=returning))


def connected(groups: Iterable[frozenset[int]], nodes: frozenset[int]) -> bool:
    """Return whether the groups join all these nodes, also through other nodes. Undirected: averaging goes both
    ways."""
    parts: list[frozenset[int]] = []
    for group in groups:
        joined, apart = group, []
        for part in parts:
            if part.isdisjoint(joined):
                apart.append(part)
            else:
                joined = joined | part
        parts = [*apart, joined]
    return len(nodes) <= 1 or any(nodes <= part for part in parts)


def _examined(rounds: GroupRounds, stage: int, replica: int, now_s: float) -> Outcome:
    """Form the group that needs no window: no other replica can come, or `replica` connects the waiting stage."""
    here = rounds.stages[stage]
    if not here.ready or here.ready <= here.returning != here.live:
        return rounds, []
    if here.ready == here.live:
        return _formed(rounds, stage, now_s, "all ready", replica)
    if rounds.waiting == stage and rounds.connects(stage):
        return _formed(rounds, stage, now_s, "connects", replica)
    return rounds, []


def _formed(rounds: GroupRounds, stage: int, now_s: float, cause: Cause, last: int | None = None) -> Outcome:
    """Form a group of the ready replicas. last: the replica whose signal or departure allowed it; None: the window's
    end did."""
    here = rounds.stages[stage]
    kept = rounds.history - 1
    after = replace(
        here,
        returning=here.returning - here.ready,
        ready=NOTHING,
        window_ends_s=None,
        recent=(*here.recent, here.ready)[-kept:] if kept else (),
    )
    group = RoundGroup(stage, now_s, tuple(sorted(here.ready)), cause, now_s - here.since_s)
    if rounds.waiting == stage:
        group = replace(group, held_s=now_s - rounds.waiting_since_s, awaited=last)
        rounds = replace(rounds, waiting=None, waiting_since_s=0.0)
    return _put(rounds, stage, after), [group]


def _put(rounds: GroupRounds, stage: int, here: StageRounds) -> GroupRounds:
    return replace(rounds, stages=(*rounds.stages[:stage], here, *rounds.stages[stage + 1 :]))
