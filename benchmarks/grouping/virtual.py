"""Rounds of pipelines in virtual time: the real ledger, scheduler, rules and order of passes, where a forward and a
backward pass take their time and all else takes none. So it is what a rule can give, on however busy a machine.

A process is a generator: it yields seconds to sleep for, or a Happening to wait for."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from atoll.agent.runtime.pipeline.schedule import Direction, after_last_forward, until_last_forward
from atoll.strategies.groups.ledger import ArrivalTimes, BatchLedger, Question, Say
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.scheduler import GroupScheduler
from atoll.strategies.groups.settings import Groups


class Happening:
    """Comes to pass once, with a value; whoever waits for it goes on then."""

    def __init__(self) -> None:
        self.value: Any = None
        self.passed = False
        self.waiting: list[Process] = []


Process: TypeAlias = Generator["float | Happening", Any, None]
Waits: TypeAlias = Generator["float | Happening", Any, Any]
NONE_NOW = "none now"


class World:
    """Time, and processes that are due."""

    def __init__(self, scheduler: GroupScheduler) -> None:
        self.now_s, self._scheduler = 0.0, scheduler
        self._due: list[tuple[float, int, Process, Any]] = []
        self._order = itertools.count()
        self.answers: dict[tuple[int, int], Happening] = defaultdict(Happening)  # by rank and signal

    def spawn(self, process: Process) -> None:
        self._later(0.0, process, None)

    def happen(self, what: Happening, value: Any = None) -> None:
        what.value, what.passed = value, True
        for process in what.waiting:
            self._later(0.0, process, value)
        what.waiting = []

    def tell(self, message: GroupsMessage) -> None:
        self._take(self._scheduler.heard(message.rank, message, self.now_s))

    def run(self) -> None:
        while self._due:
            due_s = self._scheduler.due_s
            if due_s is not None and due_s < self._due[0][0]:
                self.now_s = max(self.now_s, due_s)
                self._take(self._scheduler.passed(self.now_s))
                continue
            self.now_s, _, process, value = heapq.heappop(self._due)
            self._go_on(process, value)

    def _go_on(self, process: Process, value: Any) -> None:
        try:
            wanted = process.send(value)
        except StopIteration:
            return
        if not isinstance(wanted, Happening):
            self._later(wanted, process, None)
        elif wanted.passed:
            self._later(0.0, process, wanted.value)
        else:
            wanted.waiting.append(process)

    def _later(self, after_s: float, process: Process, value: Any) -> None:
        heapq.heappush(self._due, (self.now_s + after_s, next(self._order), process, value))

    def _take(self, answers: Any) -> None:
        for rank, answer in answers:
            happening = self.answers[rank, answer.signal]
            if not answer.waits and not happening.passed:
                self.happen(happening, answer)


@dataclass(frozen=True, slots=True)
class Pace:
    """Of a pipeline's stages: seconds of a micro-batch's forward pass. A backward pass takes twice that."""

    forward_s: tuple[float, ...]


class Claiming:
    """Whoever keeps the ledger, and the pipelines' questions."""

    def __init__(self, world: World, pipelines: int, *, in_step: bool) -> None:
        self._world, self._pipelines, self._in_step = world, pipelines, in_step
        self._arrivals, self._numbers = ArrivalTimes(), itertools.count(1)
        self._answers: dict[tuple[int, int], Happening] = defaultdict(Happening)  # by question, and which one to it
        self._given: Counter[int] = Counter()

    def begin(self, batches: int) -> None:
        everyone = range(self._pipelines)
        self._ledger = BatchLedger(
            self._pipelines, batches, everyone, self._arrivals, first=True, in_step=self._in_step
        )

    def ask(self, pipeline: int, has: int, *, begun: bool, averages: bool) -> int:
        """The question's number."""
        number = next(self._numbers)
        asked = Question(number, has, begun, averages=averages)
        for one in self._ledger.hear(pipeline, asked, self._world.now_s):
            self._world.happen(self._answers[one.number, self._given[one.number]], one)
            self._given[one.number] += 1
        return number

    def answer(self, number: int, nth: int = 0) -> Happening:
        """To this question: a second one comes after WAIT."""
        return self._answers[number, nth]


class Replica:
    """Of a pipeline what its stages share: who is told which batch, and what travels between them."""

    def __init__(self, number: int, pace: Pace) -> None:
        self.number, self.pace = number, pace
        self.told: dict[tuple[int, int, int], Happening] = defaultdict(Happening)  # by round, batch and message
        self.sent: dict[tuple[Direction, int, int, int, int], Happening] = defaultdict(Happening)
        self.has = 0
        self.begun = False


class Stage:
    """As `RoundEngine` and `StageExecutor` do it."""

    def __init__(self, trial: Trial, pipeline: Replica, stage: int) -> None:
        self._trial, self._world, self._pipeline, self._stage = trial, trial.world, pipeline, stage
        self._rank = pipeline.number * trial.stages + stage
        self._signal, self._round = 0, -1
        self._under_way: Happening | None = None
        self._done = False
        self.idle_s = self.passes_s = self.wait_s = 0.0

    def train(self, rounds: int) -> Process:
        for self._round in range(rounds):
            yield from self._train_round()
            yield self._trial.ends(self._round)

    def _train_round(self) -> Waits:
        trial, self._done, number, made = self._trial, False, -1, 0
        ahead: Any = None
        while True:
            number += 1
            batch = yield from self._agree(number, ahead)
            if batch is None:
                break
            if self._stage == 0:
                self._pipeline.begun = True
            for direction, micro, _ in until_last_forward(self._stage, trial.stages, trial.micros, made):
                yield from self._pass(direction, number, micro)
            ahead, made = None, 0
            if trial.overlaps and self._stage < trial.stages - 1:
                ahead = yield from self._know_ahead(number + 1)
            following = trial.micros if ahead not in (None, NONE_NOW) else 0
            for direction, micro, of_next in after_last_forward(self._stage, trial.stages, trial.micros, following):
                yield from self._pass(direction, number + of_next, micro)
                made += of_next
            yield from self._finish_average()
            if self._stage == 0:
                self._pipeline.has |= 1 << batch
            self._say_ready()
            if not trial.overlaps:
                yield from self._finish_average()
        yield from self._train_no_more()

    def _pass(self, direction: Direction, number: int, micro: int) -> Waits:
        forward = direction is Direction.FORWARD
        before = self._stage + (-1 if forward else 1)
        begun_s = self._world.now_s
        if 0 <= before < self._trial.stages:
            yield self._pipeline.sent[direction, before, self._round, number, micro]
        self.idle_s += self._world.now_s - begun_s
        yield self._pipeline.pace.forward_s[self._stage] * (1 if forward else 2)
        self.passes_s += self._world.now_s - begun_s
        self._world.happen(self._pipeline.sent[direction, self._stage, self._round, number, micro])

    def _agree(self, number: int, ahead: Any) -> Waits:
        """The batch, or None."""
        told = 0
        if ahead == NONE_NOW:
            yield from self._train_no_more()
            told = 1
        elif ahead is not None:
            return ahead
        pipeline = self._pipeline
        if self._stage:
            begun_s = self._world.now_s
            while (found := (yield pipeline.told[self._round, number, told])) == NONE_NOW:
                yield from self._train_no_more()
                told += 1
            if found is not None:
                self.idle_s += self._world.now_s - begun_s
                self.passes_s += self._world.now_s - begun_s
            return found
        claims = self._trial.claims
        averages = self._under_way is not None
        asked = claims.ask(pipeline.number, pipeline.has, begun=pipeline.begun, averages=averages)
        said, nth = (yield claims.answer(asked)), 1
        if averages and said.say is Say.WAIT:
            yield from self._finish_average()
            asked = claims.ask(pipeline.number, pipeline.has, begun=pipeline.begun, averages=False)
            said = yield claims.answer(asked)
        while said.say is Say.WAIT:
            self._world.happen(pipeline.told[self._round, number, told], NONE_NOW)
            told += 1
            yield from self._train_no_more()
            said, nth = (yield claims.answer(asked, nth)), nth + 1
        found = said.batch if said.say is Say.BATCH else None
        self._world.happen(pipeline.told[self._round, number, told], found)
        return found

    def _know_ahead(self, number: int) -> Waits:
        pipeline = self._pipeline
        told = pipeline.told[self._round, number, 0]
        if self._stage:
            return (yield told)
        claims = self._trial.claims
        said = yield claims.answer(claims.ask(pipeline.number, pipeline.has, begun=True, averages=True))
        self._world.happen(told, said.batch if said.say is Say.BATCH else NONE_NOW)
        return told.value

    def _say_ready(self) -> None:
        self._signal += 1
        if not self._done:
            self._under_way = self._world.answers[self._rank, self._signal]
            self._world.tell(self._message(signal=self._signal))

    def _finish_average(self) -> Waits:
        if self._under_way is not None:
            begun_s = self._world.now_s
            yield self._under_way
            self.wait_s += self._world.now_s - begun_s
            self._under_way = None

    def _train_no_more(self) -> Waits:
        yield from self._finish_average()
        if not self._done:
            self._done = True
            self._world.tell(self._message(done=True))

    def _message(self, **said: Any) -> GroupsMessage:
        workers = self._trial.stages * len(self._trial.pipelines)
        return GroupsMessage(view=1, rank=self._rank, workers=workers, round=self._round, **said)


class Trial:
    """A job of pipelines, by one rule."""

    def __init__(self, settings: Groups, paces: list[Pace], micros: int, batches: int) -> None:
        """batches: of a round."""
        self.stages, self.micros, self.overlaps = settings.stages, micros, settings.overlaps
        self.world = World(GroupScheduler(settings))
        self.claims = Claiming(self.world, len(paces), in_step=not settings.overlaps)
        self._batches = batches
        self.pipelines = [Replica(number, pace) for number, pace in enumerate(paces)]
        self._ended: dict[int, tuple[list[bool], Happening]] = defaultdict(lambda: ([], Happening()))
        self.ends_s: list[float] = []
        self.trained: list[int] = []  # bits of each round's batches

    def train(self, rounds: int) -> list[Stage]:
        """All stages, when it is over."""
        self.claims.begin(self._batches)
        stages = [Stage(self, one, stage) for one in self.pipelines for stage in range(self.stages)]
        for one in stages:
            self.world.spawn(one.train(rounds))
        self.world.run()
        if len(self.ends_s) != rounds:
            raise AssertionError(f"{len(self.ends_s)} of {rounds} rounds ended: somebody waits for ever")
        return stages

    def ends(self, round_: int) -> Happening:
        """The round, once all have come to its end."""
        here, happening = self._ended[round_]
        here.append(True)
        if len(here) == self.stages * len(self.pipelines):
            self.trained.append(sum(one.has for one in self.pipelines))
            for one in self.pipelines:
                one.has, one.begun = 0, False
            self.claims.begin(self._batches)
            self.ends_s.append(self.world.now_s)
            self.world.happen(happening)
        return happening

    @property
    def rounds_per_s(self) -> float:
        """Of those after the first."""
        return (len(self.ends_s) - 1) / (self.ends_s[-1] - self.ends_s[0])
