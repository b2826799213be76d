"""The ledger of a round: what is handed out once, handed out again, and when the round is over."""

from __future__ import annotations

import heapq
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.strategies.groups.ledger import Answer, ArrivalTimes, BatchLedger, Question, Say


def asked(
    ledger: BatchLedger, pipeline: int, number: int, has: int = 0, *, begun: bool = False, now_s: float = 0.0
) -> list[tuple[int, Say, int]]:
    return told(ledger.hear(pipeline, Question(number, has, begun), now_s))


def told(answers: list[Answer]) -> list[tuple[int, Say, int]]:
    return [(one.pipeline, one.say, one.batch) for one in answers]


def test_a_round_begins_with_all_or_not_at_all() -> None:
    ledger = BatchLedger(3, 4, range(3), ArrivalTimes(), first=True)
    assert asked(ledger, 0, 1) == []
    assert asked(ledger, 1, 1) == []
    assert sorted(told(ledger.lose(2, 0.0))) == [(0, Say.OFF, 0), (1, Say.OFF, 0)]
    ledger = BatchLedger(2, 4, range(2), ArrivalTimes(), first=True)
    asked(ledger, 1, 1)
    assert asked(ledger, 0, 1) == [(1, Say.BATCH, 0), (0, Say.BATCH, 1)]


def test_what_a_lost_pipeline_had_for_itself_is_trained_again_and_what_it_averaged_is_not() -> None:
    """1. Pipeline 2 trains batches 2 and 3, averages 2 with pipeline 0, and is lost. 2. Once both others have asked,
    batch 3 is handed out again, to one of them; then the round ends with the two."""
    ledger = BatchLedger(3, 4, range(3), ArrivalTimes(), first=True)
    for one in range(3):
        asked(ledger, one, 1)
    assert asked(ledger, 2, 2, 0b0101, begun=True) == [(2, Say.BATCH, 3)]
    assert told(ledger.lose(2, 0.0)) == []
    assert asked(ledger, 0, 2, 0b0101, begun=True) == [(0, Say.WAIT, 0)]
    assert asked(ledger, 1, 2, 0b0010, begun=True) == [(0, Say.BATCH, 3), (1, Say.WAIT, 0)]
    ended = ledger.hear(0, Question(3, 0b1101, begun=True), 0.0)
    assert {(one.pipeline, one.say, one.members) for one in ended} == {(0, Say.END, (0, 1)), (1, Say.END, (0, 1))}


def test_what_an_average_under_way_may_bring_in_is_not_handed_out_again() -> None:
    """1. Pipeline 1 is lost in an average with pipeline 0, which has it in its next question: it is told to wait, and
    nothing is handed out, though it alone lives. 2. The average is over, and brought batch 1 in: the round ends."""
    ledger = BatchLedger(2, 2, range(2), ArrivalTimes(), first=True)
    for one in range(2):
        asked(ledger, one, 1)
    assert told(ledger.lose(1, 0.0)) == []
    assert told(ledger.hear(0, Question(2, 0b01, begun=True, averages=True), 0.0)) == [(0, Say.WAIT, 0)]
    assert asked(ledger, 0, 3, 0b11, begun=True) == [(0, Say.END, 0)]


def test_who_takes_over_asks_all_first_and_lets_an_end_that_was_told_stand() -> None:
    """1. The keeper, pipeline 0, is lost when it has told pipeline 2 alone that the round ends. 2. Pipeline 1 takes
    over: it hears so, and is told the same."""
    ledger = BatchLedger(3, 3, [1, 2], ArrivalTimes(), first=False)
    assert ledger.hear(1, Question(2, 0b010, begun=True), 0.0) == []
    (answer,) = ledger.hear(2, Question(0, 0b100, begun=True, ended=(0, 1, 2)), 0.0)
    assert (answer.pipeline, answer.say, answer.members) == (1, Say.END, (0, 1, 2))
    assert asked(ledger, 2, 3, 0b110, begun=True) == [(2, Say.WAIT, 0)]
    assert asked(ledger, 1, 3, 0b110, begun=True) == [(2, Say.BATCH, 0), (1, Say.WAIT, 0)]


def test_a_question_that_comes_twice_is_answered_in_vain_and_that_batch_handed_out_again() -> None:
    """1. Pipeline 0's first question arrives a second time, and is answered with batch 2, which it does not take: it
    has its answer. 2. Once all are asking, batch 2 is nobody's, and handed out."""
    ledger = BatchLedger(2, 3, range(2), ArrivalTimes(), first=True)
    asked(ledger, 0, 1)
    asked(ledger, 1, 1)
    assert asked(ledger, 0, 1) == [(0, Say.BATCH, 2)]
    assert asked(ledger, 0, 2, 0b001, begun=True) == [(0, Say.WAIT, 0)]
    assert asked(ledger, 1, 2, 0b010, begun=True) == [(0, Say.BATCH, 2), (1, Say.WAIT, 0)]


def test_an_average_under_way_ends_before_who_is_in_it_hears_that_the_round_does() -> None:
    """Nor is it handed out what it would not look at: it asks again, once that is over."""
    ledger = BatchLedger(2, 2, [0, 1], ArrivalTimes(), first=False)
    ledger.hear(1, Question(0, 0b11, begun=True, ended=(0, 1)), 0.0)
    assert told(ledger.hear(0, Question(1, 0b01, begun=True, averages=True), 0.0)) == [(0, Say.WAIT, 0)]
    assert asked(ledger, 0, 2, 0b11, begun=True) == [(0, Say.END, 0)]


def trained_s(batches: int, takes_s: list[int], arrivals: ArrivalTimes, begin_s: float) -> float:
    """When a round is over, of pipelines that take so long for a batch."""
    everyone = range(len(takes_s))
    ledger = BatchLedger(len(takes_s), batches, everyone, arrivals, first=True)
    free = [(begin_s, one) for one in everyone]
    has, numbers, over_s = dict.fromkeys(everyone, 0), 0, begin_s
    while free:
        now_s, pipeline = heapq.heappop(free)
        numbers += 1
        for one in ledger.hear(pipeline, Question(numbers, has[pipeline], begun=now_s > begin_s), now_s):
            if one.say is Say.BATCH:
                has[one.pipeline] |= 1 << one.batch
                over_s = max(over_s, now_s + takes_s[one.pipeline])
                heapq.heappush(free, (now_s + takes_s[one.pipeline], one.pipeline))
    assert sum(has.values()) == (1 << batches) - 1
    return over_s


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_round_is_over_as_soon_as_it_can_be_once_it_is_known_how_fast_pipelines_are(
    batches: int, takes_s: list[int]
) -> None:
    """The last ones are not for who would end them after the others have trained all: a slow pipeline waits."""
    arrivals = ArrivalTimes()
    trained_s(3 * len(takes_s) * max(takes_s), takes_s, arrivals, 0.0)
    least_s = next(end_s for end_s in itertools.count() if sum(end_s // each for each in takes_s) >= batches)
    assert trained_s(batches, takes_s, arrivals, 1000.0) == 1000.0 + least_s


def test_pipelines_in_step_all_train_the_last_batches_however_slow_one_is() -> None:
    arrivals = ArrivalTimes()
    trained_s(20, [1, 5], arrivals, 0.0)
    for in_step, to in ((False, {0}), (True, {0, 1})):
        ledger = BatchLedger(2, 2, range(2), arrivals, first=True, in_step=in_step)
        answers = [one for pipeline in (1, 0) for one in ledger.hear(pipeline, Question(1), 1000.0)]
        assert {one.pipeline for one in answers if one.say is Say.BATCH} == to


class Pipelines:
    """Train, average in pairs beside that and are lost at any time, as chance has it; the ledger goes to the lowest
    that lives."""

    def __init__(self, count: int, batches: int, seed: int) -> None:
        self.count, self.batches, self.draw = count, batches, random.Random(seed)
        self.live = set(range(count))
        self.now_s = 0.0
        self.ledger = BatchLedger(count, batches, self.live, ArrivalTimes(), first=True)
        self.holds: dict[int, set[tuple[int, int]]] = {one: set() for one in self.live}  # (batch, which training of it)
        self.questions = {one: Question() for one in self.live}
        self.at_work = dict.fromkeys(self.live, -1)
        self.asks = set(self.live)
        self.under_way: dict[int, set[tuple[int, int]] | None] = {}  # averages, and what they bring once they are made
        self.ended: dict[int, tuple[int, ...]] = {}
        self.trained = self.numbers = 0

    def has(self, one: int) -> int:
        return sum(1 << batch for batch in {batch for batch, _ in self.holds[one]})

    def hear(self, answers: list[Answer]) -> None:
        for one in answers:
            at = one.pipeline
            if one.say is Say.WAIT:
                if at in self.under_way:
                    self.finish_average(at)
                    self.asks.add(at)
            elif one.say is Say.BATCH:
                self.at_work[at] = one.batch
                self.questions[at] = Question(0, self.has(at), begun=True)
            elif one.say is Say.END:
                self.finish_average(at)
                self.ended[at] = one.members
                self.questions[at] = Question(0, self.has(at), begun=True, ended=one.members)
            elif one.say is Say.OFF:
                assert not self.questions[at].begun
                self.ended[at] = ()

    def finish_average(self, one: int) -> None:
        self.holds[one] = self.holds[one] | (self.under_way.pop(one, None) or set())

    def over(self) -> bool:
        """Whether the round is: where all are told so, they average. One that was lost before may leave some to do."""
        if not all(one in self.ended for one in self.live):
            return False
        if not self.ended[min(self.live)]:
            return True  # it never began
        union = set[tuple[int, int]]().union(*(self.holds[one] for one in self.live))
        if {batch for batch, _ in union} == set(range(self.batches)):
            assert len(union) == self.batches
            return True
        for one in self.live:
            self.holds[one] = set(union)
        self.asks |= self.live
        self.ended.clear()
        return False

    def turn(self) -> None:
        self.now_s += self.draw.random()
        chance = self.draw.random()
        if chance < 0.05 and len(self.live) > 1:
            self._lose(self.draw.choice(sorted(self.live)))
        elif chance < 0.25:
            pair = sorted(one for one, made in self.under_way.items() if made is None)
            if len(pair) > 1:
                first, second = self.draw.sample(pair, 2)
                self.under_way[first] = self.under_way[second] = self.holds[first] | self.holds[second]
        elif self.asks and chance < 0.6:
            one = self.draw.choice(sorted(self.asks))
            self.asks.discard(one)
            self.numbers += 1
            averages = one in self.under_way
            self.questions[one] = Question(self.numbers, self.has(one), self.questions[one].begun, averages=averages)
            self.hear(self.ledger.hear(one, self.questions[one], self.now_s))
        elif busy := sorted(one for one in self.live if self.at_work[one] >= 0):
            one = self.draw.choice(busy)
            self.trained += 1
            self.finish_average(one)
            self.under_way[one] = None
            self.holds[one] = self.holds[one] | {(self.at_work[one], self.trained)}
            self.at_work[one] = -1
            self.asks.add(one)

    def _lose(self, lost: int) -> None:
        kept = min(self.live)
        self.live.discard(lost)
        self.asks.discard(lost)
        self.under_way.pop(lost, None)
        self.ended.pop(lost, None)
        if lost != kept:
            self.hear(self.ledger.lose(lost, self.now_s))
            return
        self.ledger = BatchLedger(self.count, self.batches, self.live, ArrivalTimes(), first=False)
        for one in self.draw.sample(sorted(self.live), len(self.live)):
            self.hear(self.ledger.hear(one, self.questions[one], self.now_s))


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 10**6))
def test_every_batch_is_in_the_state_of_all_at_the_end_and_none_is_there_twice(
    pipelines: int, batches: int, seed: int
) -> None:
    """Whoever is lost when, keepers too, but for one of them; and no round waits for ever."""
    world = Pipelines(pipelines, batches, seed)
    for _ in range(5000):
        if world.over():
            return
        world.turn()
    raise AssertionError(f"the round did not end: {world.live} of {pipelines}, {world.ended}, {world.at_work}")
