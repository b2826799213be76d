"""Record of who trains which batch of a round, as one of its pipelines keeps it. Pure: time is given.

The lowest pipeline that lives keeps it. A batch is handed out once while its pipeline lives. What a lost one trained
counts where it is in somebody's state: each says with every question which batches are in its own, and averages bring
in those of the others. The rest is handed out again once all who live are asking and nobody is in an average
that may bring in more. Whoever takes over from a lost keeper begins with that, and so needs nothing of what it knew.

The last batches of a round are not for a slow pipeline that would still train one when the others have done all that
is left: all would wait for it at the round's end. So a round of pipelines that are as fast as before is as short as it
can be."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

EARLIER: Final = 8  # iterations of a replica from which its next one is predicted


@dataclass
class ArrivalTimes:
    """Arrival times of replicas over all rounds."""

    took_s: dict[int, deque[float]] = field(default_factory=dict)
    began_s: dict[int, float] = field(default_factory=dict)

    def ready(self, replica: int, now_s: float) -> None:
        if (began_s := self.began_s.pop(replica, None)) is not None:
            self.took_s.setdefault(replica, deque(maxlen=EARLIER)).append(now_s - began_s)

    def resumed(self, replica: int, now_s: float) -> None:
        self.began_s[replica] = now_s

    def iteration_s(self) -> float | None:
        """The median replica's; None before two of them were measured."""
        medians = [statistics.median(took) for took in self.took_s.values()]
        return statistics.median(medians) if len(medians) > 1 else None

    def took(self, replica: int) -> float | None:
        """An iteration of it; None before one was measured."""
        took = self.took_s.get(replica)
        return statistics.median(took) if took else None

    def free_s(self, replica: int, now_s: float) -> float:
        """Estimate when a replica is ready; it may already be."""
        took, began_s = self.took(replica), self.began_s.get(replica)
        return now_s if took is None or began_s is None else max(began_s + took, now_s)

    def expected(self, replica: int) -> tuple[float, float] | None:
        """Return the expected and the latest probable time at which a replica is ready."""
        took, began_s = self.took_s.get(replica), self.began_s.get(replica)
        if not took or began_s is None:
            return None
        return began_s + statistics.median(took), began_s + 1.05 * max(took)


class Say(Enum):
    BATCH = "batch"  # train this one
    WAIT = "wait"  # there is none now, and there may be: others are at work
    END = "end"  # all batches are in somebody's state: average with these pipelines
    OFF = "off"  # somebody was lost before the round began: it does not


@dataclass(frozen=True, slots=True)
class Question:
    """Question of a pipeline. number: in the round, from 1; 0: it asks nothing. has: bits of the batches in its
    state. begun: it has trained in the round. ended: the group that it was to average with, if that is not over.
    averages: an average or a batch is running that may add more; if there is no batch now, it asks again."""

    number: int = 0
    has: int = 0
    begun: bool = False
    ended: tuple[int, ...] = ()
    averages: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to this pipeline's question of that number."""

    pipeline: int
    number: int
    say: Say
    batch: int = 0
    members: tuple[int, ...] = ()


class BatchLedger:
    """Ledger of one round's batches."""

    def __init__(
        self,
        pipelines: int,
        batches: int,
        live: Iterable[int],
        arrivals: ArrivalTimes,
        *,
        first: bool,
        in_step: bool = False,
    ) -> None:
        """live: those that are not lost. arrivals: of questions, over all rounds that this one kept. first: nobody kept
        the round before. in_step: nobody goes on before all have averaged, after every batch."""
        self._batches, self._all, self._live = batches, frozenset(range(pipelines)), set(live)
        self._arrivals, self._in_step = arrivals, in_step
        self._fresh = deque(range(batches) if first else ())
        self._questions: dict[int, Question] = {}
        self._asking: dict[int, int] = {}  # numbers of questions, in the order in which they came
        self._waits: dict[int, int] = {}  # of them, those that were told to
        self._unheard = set() if first else set(self._live)
        self._begun = False
        self._ended: tuple[int, ...] = ()
        self._told_end: set[int] = set()

    def hear(self, pipeline: int, question: Question, now_s: float) -> list[Answer]:
        if pipeline not in self._live:
            return []
        self._unheard.discard(pipeline)
        self._questions[pipeline] = question
        self._begun = self._begun or question.begun
        if question.ended:
            self._ended = question.ended
            self._told_end.add(pipeline)
        if question.number:
            self._asking[pipeline] = question.number
            self._arrivals.ready(pipeline, now_s)
        return self._answers(now_s)

    def lose(self, pipeline: int, now_s: float) -> list[Answer]:
        self._live.discard(pipeline)
        self._unheard.discard(pipeline)
        self._asking.pop(pipeline, None)
        return self._answers(now_s)

    def _answers(self, now_s: float) -> list[Answer]:
        if self._unheard:
            return []
        if not self._begun:
            if self._live != self._all:
                return [self._answer(one, Say.OFF) for one in list(self._asking)]
            if self._asking.keys() != self._live:
                return []
            self._begun = True
        found = [
            self._answer(one, Say.END, members=self._ended)
            for one in list(self._asking)
            if self._ended and one not in self._told_end and not self._questions[one].averages
        ]
        self._told_end.update(one.pipeline for one in found)
        found += self._handed_out(now_s)
        averaging = any(self._questions[one].averages for one in self._asking)
        if self._asking and self._asking.keys() == self._live and not averaging:
            self._ended, self._told_end = (), set()
            held = 0
            for one in self._live:
                held |= self._questions[one].has
            self._fresh = deque(batch for batch in range(self._batches) if not held >> batch & 1)
            if self._fresh:
                return found + self._handed_out(now_s) + self._waiting()
            self._ended = tuple(sorted(self._live))
            self._told_end = set(self._live)
            return found + [self._answer(one, Say.END, members=self._ended) for one in list(self._asking)]
        return found + self._waiting()

    def _handed_out(self, now_s: float) -> list[Answer]:
        found = []
        for one in list(self._asking):
            told_to_wait = self._waits.get(one) == self._asking[one]
            if not self._fresh or (told_to_wait and self._questions[one].averages) or self._too_late(one, now_s):
                continue
            self._arrivals.resumed(one, now_s)
            found.append(self._answer(one, Say.BATCH, batch=self._fresh.popleft()))
        return found

    def _too_late(self, pipeline: int, now_s: float) -> bool:
        """Return True if the others would train all unassigned batches before this pipeline trained one. If all are
        asking, the fastest is never too late, so that one gets a batch."""
        own_s = self._arrivals.took(pipeline)
        if own_s is None or self._in_step:
            return False
        others = 0
        for one in self._live - {pipeline}:
            took_s = self._arrivals.took(one)
            if took_s is None:
                return False
            busy_s = 0.0 if one in self._asking else self._arrivals.free_s(one, now_s) - now_s
            others += max(math.ceil((own_s - busy_s) / took_s) - 1, 0) if took_s > 0 else 0
        return others >= len(self._fresh)

    def _waiting(self) -> list[Answer]:
        new = {one: number for one, number in self._asking.items() if self._waits.get(one) != number}
        self._waits |= new
        return [Answer(one, number, Say.WAIT) for one, number in new.items()]

    def _answer(self, pipeline: int, say: Say, batch: int = 0, members: tuple[int, ...] = ()) -> Answer:
        return Answer(pipeline, self._asking.pop(pipeline), say, batch, members)
