"""The scheduler's answers to signals that come, come late, come twice or never; and what it is compared with."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from atoll.controller.planners.pipelines.group_rounds import RoundGroup
from atoll.controller.planners.pipelines.group_waits import StageWaits
from atoll.controller.planners.pipelines.groups import GroupsInput, plan_groups
from atoll.strategies.groups.ledger import ArrivalTimes
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.rules import RandomPairs, StageRule, Static, WholePipelines
from atoll.strategies.groups.scheduler import GroupScheduler, Scheduled
from atoll.strategies.groups.settings import Groups


class Heard:
    """What workers of one view tell the scheduler; their ranks in the run are ten more than in the view."""

    def __init__(self, scheduler: GroupScheduler, workers: int, view: int = 1) -> None:
        self._scheduler, self._workers, self._view = scheduler, workers, view

    def __call__(self, rank: int, now_s: float, **said: Any) -> list[tuple[int, GroupsMessage]]:
        message = GroupsMessage(view=self._view, rank=rank, workers=self._workers, **said)
        return [(to - 10, answer) for to, answer in self._scheduler.heard(rank + 10, message, now_s)]


def test_a_repeated_signal_gets_its_answer_again_and_an_older_one_nothing() -> None:
    heard = Heard(GroupScheduler(Groups(grouping="all")), 2)
    assert heard(0, 0.0, signal=1) == []
    ((rank, waits),) = heard(0, 0.5, signal=1)
    assert (rank, waits.waits, waits.group) == (0, True, 0)
    answers = dict(heard(1, 1.0, signal=1))
    assert {rank: answer.members for rank, answer in answers.items()} == {0: [0, 1], 1: [0, 1]}
    assert heard(0, 1.5, signal=1) == [(0, answers[0])]
    assert heard(0, 2.0, signal=2) == []
    assert heard(0, 2.5, signal=1) == []


def test_who_is_lost_is_not_waited_for_once_another_says_so() -> None:
    """1. Rank 2 is lost. 2. Rank 0 misses it, and says so with its repeated signal: it and rank 1 go on. 3. Rank 2 was
    only slow: it is told that the others go on without it, and what it says of them counts for nothing."""
    heard = Heard(GroupScheduler(Groups(grouping="all")), 3)
    heard(0, 0.0, signal=1)
    heard(1, 0.0, signal=1)
    answers = heard(0, 0.5, signal=1, ended=[2])
    assert sorted({(rank, tuple(answer.members)) for rank, answer in answers}) == [(0, (0, 1)), (1, (0, 1))]
    for said in ({"done": True}, {"signal": 1, "ended": [0, 1]}):
        assert [(rank, answer.lost) for rank, answer in heard(2, 1.0, **said)] == [(2, True)]
    heard(0, 1.5, signal=2)
    assert [rank for rank, _ in heard(1, 1.5, signal=2)] == [0, 1]


def test_a_replica_that_waits_is_told_at_once_that_another_one_lost_it() -> None:
    """1. Rank 1 is ready, and waits for rank 0. 2. Rank 0 has lost it: rank 1 is told before it asks again."""
    heard = Heard(GroupScheduler(Groups(grouping="all")), 2)
    heard(1, 0.0, signal=1)
    assert [(rank, answer.lost) for rank, answer in heard(0, 0.1, ended=[1])] == [(1, True)]
    assert heard(0, 0.2, ended=[1]) == []


def test_a_new_round_forgets_the_last_and_late_messages_of_it_are_dropped() -> None:
    heard = Heard(GroupScheduler(Groups(grouping="all")), 2)
    heard(0, 0.0, signal=1)
    heard(1, 0.0, done=True)
    heard(0, 1.0, signal=2, round=1)
    assert heard(1, 1.5, signal=1) == []  # of round 0
    answers = heard(1, 2.0, signal=1, round=1)
    assert {(answer.round, answer.group) for _, answer in answers} == {(1, 1)}


def test_a_later_view_begins_anew_with_as_many_workers_as_it_has() -> None:
    """1. Three replicas; one is lost, and the run goes on with two, whose rounds and signals begin again. 2. What the
    lost one said comes late, and silences nobody."""
    scheduler = GroupScheduler(Groups(grouping="all"))
    before, after = Heard(scheduler, 3), Heard(scheduler, 2, view=2)
    before(0, 0.0, signal=7, round=4)
    assert after(0, 1.0, signal=1) == []
    assert before(2, 1.5, signal=9, round=5) == []
    assert sorted(rank for rank, _ in after(1, 2.0, signal=1)) == [0, 1]


class Waiting:
    """Three replicas, of which two are as fast and are held for the third in every third group: the answers are given
    as a controller would give them, and what it is told is collected with its time."""

    def __init__(self) -> None:
        self._scheduler = GroupScheduler(Groups(window_s=1.0, history=3))
        self._heard = Heard(self._scheduler, 3)
        self._signals = dict.fromkeys(range(3), 0)
        self._now_s = 0.0
        self.told: list[tuple[float, str]] = []

    def ready(self, rank: int, after_s: float = 0.0) -> list[tuple[int, ...]]:
        self._now_s += after_s
        self._signals[rank] += 1
        answers = self._heard(rank, self._now_s, signal=self._signals[rank])
        return self._groups(answers)

    def passes(self, seconds: float) -> list[tuple[int, ...]]:
        self._now_s += seconds
        return self._groups((to - 10, answer) for to, answer in self._scheduler.passed(self._now_s))

    def _groups(self, answers: Any) -> list[tuple[int, ...]]:
        formed = sorted({tuple(answer.members) for _, answer in answers})
        self.told += [(self._now_s, text) for text in self._scheduler.take_notices(self._now_s)]
        return formed

    def three_groups(self) -> None:
        for _ in range(2):
            assert self.ready(0) == self.ready(1) == []
            assert self.passes(1.0) == [(0, 1)]
        assert self.ready(0) == self.ready(1) == self.passes(1.0) == []
        assert self.ready(2, after_s=0.5) == [(0, 1, 2)]


def test_the_events_say_once_why_a_group_waited_and_then_sum_up_more_and_more_seldom() -> None:
    """1. Two replicas wait half a second for the third, that the last three groups connect: that is told at once. 2. A
    minute later comes a sum, two minutes after that the next one: 300 groups are three sentences. 3. The planner says
    it of its replay in the same words."""
    waiting = Waiting()
    waiting.three_groups()
    first = "waited 0.5 s in all for replica 2: without it the last 3 groups would not connect all replicas"
    assert waiting.told == [(3.5, f"stage 0, of 3 groups: 1 {first}")]
    for _ in range(99):
        waiting.three_groups()
    times_s = [at_s for at_s, _ in waiting.told]
    assert [later - before for before, later in itertools.pairwise(times_s)] == [60.5, 120.0]
    assert waiting.told[1][1] == f"stage 0, of 52 groups: 17 {first}".replace("0.5 s", "8.5 s")
    replayed = GroupsInput(
        replicas=3, window_s=0.25, history=3, average_s=0.0, until_s=3.5, iteration_s=((1.0, 1.0, 2.75),)
    )
    assert plan_groups(replayed).waits == (f"stage 0, of 1 groups: 1 {first}".replace("0.5", "1.5"),)


def test_the_events_say_who_did_not_wait_because_another_stage_did_and_whose_window_was_widened() -> None:
    """1. Stage 1 waits for replica 2, so that stage 0 does not. 2. A window is widened for one that is late: that alone
    is no event."""
    scheduler = GroupScheduler(Groups(stages=2, window_s=1.0, history=2))
    heard = Heard(scheduler, 6)
    for signal in (1, 2):
        for rank in (0, 2, 1, 3):  # both stages of the first two pipelines
            heard(rank, 2.0 * signal, signal=signal)
        scheduler.passed(2.0 * signal + 1.0)
    told = scheduler.take_notices(6.0)
    assert told == ["stage 0, of 2 groups: 1 did not wait until groups connect, for another stage did"]
    heard(5, 6.5, signal=1)
    assert scheduler.take_notices(7.0) == []  # before a minute is over
    (later,) = scheduler.take_notices(66.0)
    assert later.startswith("stage 1, of 1 groups: 1 waited 1.5 s in all for replica 2: without it the last 2 groups")
    waits = StageWaits()
    assert not waits.add(RoundGroup(0, 1.0, (0, 1), "window over", waited_s=0.5, widened_s=0.02))
    assert waits.in_words(0, 10) == "stage 0, of 1 groups: 1 waited 0.020 s in all for replicas that were late"
    assert StageWaits().in_words(0, 10) is None


def rules(stages: int, replicas: int) -> list[StageRule]:
    return [
        WholePipelines(Static(replicas, replicas), stages),
        Scheduled(stages, replicas, 3, 0.0, ArrivalTimes()),
        WholePipelines(RandomPairs(replicas, seed=3), stages),
        WholePipelines(Static(replicas, 2), stages),
    ]


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(0, 3), st.integers(0, 1000))
def test_by_every_rule_everyone_is_answered_once_whoever_is_done_when(
    stages: int, replicas: int, which: int, seed: int
) -> None:
    """Stages of pipelines become ready and done in any order; a pipeline trains again once all its stages are in
    groups. Each signal is in one group; when nobody trains, nobody waits."""
    rule, draw = rules(stages, replicas)[which], random.Random(seed)
    left = {replica: draw.randint(0, 5) for replica in range(replicas)}
    training = {(stage, replica) for stage in range(stages) for replica in left}
    waiting, released = set[tuple[int, int]](), dict.fromkeys(left, 0)
    for now in itertools.count():
        if not training:
            break
        stage, replica = draw.choice(sorted(training))
        training.remove((stage, replica))
        if left[replica] == 0:
            formed = rule.done(stage, replica, float(now))
        else:
            waiting.add((stage, replica))
            formed = rule.ready(stage, replica, float(now))
        if rule.due_s is not None and (draw.random() < 0.5 or not training):
            formed = [*formed, *rule.passed(now + 0.5)]
        for group in formed:
            assert all((group.stage, member) in waiting for member in group.members)
            waiting.difference_update((group.stage, member) for member in group.members)
            for member in group.members:
                released[member] += 1
                if released[member] == stages:
                    released[member], left[member] = 0, left[member] - 1
                    training.update((one, member) for one in range(stages))
    assert not waiting


def trained_in(rule: Scheduled, arrivals: ArrivalTimes, times: list[float], until_s: float) -> int:
    """Iterations of all, in simulated time: as planner `groups` replays it, with the rule's own windows."""
    ends = dict(enumerate(times))
    trained = 0
    while True:
        replica = min(ends, key=lambda one: ends[one], default=None)
        due_s = rule.due_s
        if replica is not None and (due_s is None or ends[replica] <= due_s):
            now_s = ends.pop(replica)
            if now_s > until_s:
                return trained
            trained += 1
            arrivals.ready(replica, now_s)
            formed = rule.ready(0, replica, now_s)
        else:
            assert due_s is not None
            now_s = due_s
            formed = rule.passed(now_s)
        for group in formed:
            for member in group.members:
                arrivals.resumed(member, now_s)
                ends[member] = now_s + times[member]


@pytest.mark.parametrize(
    ("times", "least"), [([1.0, 1.0, 1.0, 3.05], 2.4), ([1.0] * 4, 1.0), ([1.0, 1.02, 1.5, 2.1], 1.5)]
)
def test_windows_are_not_kept_open_for_who_cannot_come(times: list[float], least: float) -> None:
    """How many times the iterations of an all-reduce. With windows of a fourth of an iteration, as published, three
    equal replicas wait for the fourth in vain each time, and have 2.1."""
    until_s = 400.0
    arrivals = ArrivalTimes()
    trained = trained_in(Scheduled(1, 4, 10, 0.0, arrivals), arrivals, times, until_s)
    assert trained >= least * 4 * (until_s // max(times))
