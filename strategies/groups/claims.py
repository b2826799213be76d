"""Claims a round's batches: a pipeline's line to whoever keeps the ledger; and the ledger, where this one does.

Each pipeline asks after each batch. Where the keeper is lost, the next one takes over with what the others tell it of
themselves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from atoll.agent.runtime.model.places import StagePlace
from atoll.errors import PeerLost
from atoll.strategies.groups.ledger import Answer, ArrivalTimes, BatchLedger, Question, Say

CLAIM: Final = 8
"""The first byte of these messages: averages have smaller ones, stages greater ones."""
MOST_BYTES: Final = 1 << 20
REPEAT_S: Final = 0.5


class Claims:
    """`deliver`, `lose` and `fail` run on the transport's thread, the rest on the training thread.

    Of a pipeline's first stage; the others hear of batches from it."""

    def __init__(
        self,
        place: StagePlace,
        send: Callable[[int, int, int, int, bytes], None],
        deadline_s: float,
        *,
        in_step: bool,
    ) -> None:
        """send: to rank, (round, 0, 0, payload). in_step: as the ledger's."""
        self._place, self._send, self._deadline_s, self._in_step = place, send, deadline_s, in_step
        self._changed = threading.Condition()
        self._live = set(range(place.pipelines))
        self._round, self._batches = -1, 0
        self._question, self._numbers = Question(), 0
        self._answer: Answer | None = None
        self._ledger: tuple[int, BatchLedger] | None = None  # with its round
        self._arrivals = ArrivalTimes()
        self._early: dict[int, tuple[int, int, Question]] = {}  # by pipeline, with round and batches: before it keeps
        self._broken: PeerLost | None = None
        self._why = ""

    def begin(self, round_: int, batches: int) -> None:
        with self._changed:
            self._round, self._batches = round_, batches
            self._question, self._answer = Question(), None

    def next(self, has: int, waits: Callable[[], None], *, averages: bool = False) -> Answer:
        """A batch, or with whom to average at the round's end. Raises PeerLost.

        has: bits of the batches in this pipeline's state. waits: called again and again while there is none. averages:
        an average or a batch is under way, which is to be over before this pipeline waits: then WAIT is an answer."""
        with self._changed:
            self._numbers += 1
            self._answer = None
            self._question = Question(self._numbers, has, self._question.begun, averages=averages)
            self._ask()
        ends_s, waiting = time.monotonic() + self._deadline_s, False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._answer is not None or self._broken is not None, REPEAT_S)
                if self._broken is not None:
                    raise self._broken
                answer, self._answer = self._answer, None
                if answer is not None and answer.say is not Say.WAIT:
                    return self._taken(answer)
            if answer is not None and averages:
                return answer
            waiting = waiting or answer is not None
            if waiting:
                waits()
            if time.monotonic() > ends_s:
                raise PeerLost(f"no batch of the round was free for {self._deadline_s:.0f} s, nor was it over")

    def _taken(self, answer: Answer) -> Answer:
        if answer.say is Say.OFF:
            raise PeerLost(self._why or "a peer was lost before the round began")
        self._question = replace(self._question, number=0, begun=True, ended=answer.members, averages=False)
        return answer

    # --- the wire's thread

    def deliver(self, origin: int, round_: int, payload: bytes | memoryview) -> str | None:
        """Returns why it was refused."""
        try:
            told: dict[str, Any] = json.loads(bytes(payload[1:MOST_BYTES]))
            lost = int(told["lost"]) if "lost" in told else None
            question = read_question(told["question"]) if "question" in told else None
            answer = self._read_answer(told["answer"]) if "answer" in told else None
            batches = int(told.get("batches", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            return "malformed"
        if lost == self._place.rank:
            self.fail(f"rank {origin} goes on without this one, which it misses")
        elif lost is not None and 0 <= lost < self._place.stages * self._place.pipelines:
            self.lose(lost, f"rank {origin} misses rank {lost}")
        if question is not None and origin % self._place.stages == 0:
            with self._changed:
                self._hear(origin // self._place.stages, round_, batches, question)
        if answer is not None:
            with self._changed:
                if round_ == self._round and answer.number == self._question.number:
                    self._answer = answer
                    self._changed.notify_all()
        return None

    def lose(self, rank: int, reason: str) -> None:
        """The others go on without the pipeline of this rank."""
        lost = rank // self._place.stages
        with self._changed:
            if lost not in self._live:
                return
            kept = min(self._live)
            self._live.discard(lost)
            self._why = self._why or reason
            for other in self._others():
                self._tell(other, self._round, {"lost": rank})
            if self._ledger is not None:
                self._give(self._ledger[0], self._ledger[1].lose(lost, time.monotonic()))
            if kept == lost:
                self._succeed()

    def fail(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or PeerLost(reason)
            self._changed.notify_all()

    # --- with the lock

    def _others(self) -> Iterable[int]:
        return sorted(self._live - {self._place.pipeline})

    def _ask(self) -> None:
        """Tell the keeper how this pipeline stands."""
        keeper = min(self._live)
        if keeper == self._place.pipeline:
            self._hear(keeper, self._round, self._batches, self._question)
        else:
            asked = {"question": written(self._question), "batches": self._batches}
            self._tell(keeper, self._round, asked)

    def _succeed(self) -> None:
        """The keeper is lost: another takes over what all tell of themselves."""
        if min(self._live) != self._place.pipeline:
            self._ask()
            return
        self._ledger = (self._round, self._new_ledger(self._batches, first=False))
        self._ask()
        early, self._early = self._early, {}
        for pipeline, heard in sorted(early.items(), key=lambda item: item[1][0]):
            self._hear(pipeline, *heard)

    def _hear(self, pipeline: int, round_: int, batches: int, question: Question) -> None:
        if min(self._live) != self._place.pipeline:
            self._early[pipeline] = (round_, batches, question)  # who asks knows already that the keeper is lost
            return
        if self._ledger is None or self._ledger[0] < round_:
            self._ledger = (round_, self._new_ledger(batches, first=True))
        kept, ledger = self._ledger
        self._give(kept, ledger.hear(pipeline, question if round_ == kept else Question(), time.monotonic()))

    def _new_ledger(self, batches: int, *, first: bool) -> BatchLedger:
        return BatchLedger(
            self._place.pipelines, batches, self._live, self._arrivals, first=first, in_step=self._in_step
        )

    def _give(self, round_: int, answers: Iterable[Answer]) -> None:
        for one in answers:
            if one.pipeline == self._place.pipeline:
                self._answer = one
                self._changed.notify_all()
            else:
                self._tell(one.pipeline, round_, {"answer": [one.number, one.say.value, one.batch, list(one.members)]})

    def _tell(self, pipeline: int, round_: int, told: dict[str, Any]) -> None:
        rank = pipeline * self._place.stages
        try:
            self._send(rank, max(round_, 0), 0, 0, bytes([CLAIM]) + json.dumps(told).encode())
        except PeerLost as error:
            self._broken = self._broken or error
            self._changed.notify_all()

    def _read_answer(self, values: Any) -> Answer:
        number, say, batch, members = values
        return Answer(self._place.pipeline, int(number), Say(say), int(batch), tuple(int(one) for one in members))


def written(question: Question) -> list[Any]:
    return [question.number, f"{question.has:x}", question.begun, list(question.ended), question.averages]


def read_question(values: Any) -> Question:
    number, has, begun, ended, averages = values
    return Question(int(number), int(has, 16), bool(begun), tuple(int(one) for one in ended), bool(averages))
