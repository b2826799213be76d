"""The scheduler's answers to signals that come, come late, come twice or never; and what it is compared with."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.rules import ArrivalTimes, RandomPairs, StageRule, Static, Together, WholePipelines
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
    """1. Rank 2 is lost. 2. Rank 0 misses it, and says so with its repeated signal: it and rank 1 go on."""
    heard = Heard(GroupScheduler(Groups(grouping="all")), 3)
    heard(0, 0.0, signal=1)
    heard(1, 0.0, signal=1)
    answers = heard(0, 0.5, signal=1, ended=[2])
    assert sorted({(rank, tuple(answer.members)) for rank, answer in answers}) == [(0, (0, 1)), (1, (0, 1))]
    assert heard(2, 1.0, done=True) == []


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


def rules(stages: int, replicas: int) -> list[StageRule]:
    return [
        WholePipelines(Together(replicas), stages),
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
        for at, members in formed:
            assert all((at, member) in waiting for member in members)
            waiting.difference_update((at, member) for member in members)
            for member in members:
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
        for _, members in formed:
            for member in members:
                arrivals.goes_on(member, now_s)
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
