"""Replay the grouping of replicas of unequal speed: the rules of group_rounds.py against given times.

SDPipe (Miao et al., 2023), Algorithm 2 with the enforcement of section 3.4."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, model_validator

from atoll.controller.planners.pipelines.group_rounds import GroupRounds, RoundGroup, passed, ready
from atoll.controller.planners.pipelines.group_waits import StageWaits
from atoll.planning.schemas import Schema, Seconds

MAX_STAGES: Final = 256
MAX_REPLICAS: Final = 1_024
MAX_ITERATIONS: Final = 100_000
"""Iterations of one replay; an input with more is refused."""

Iteration = Annotated[float, Field(ge=1e-6, le=1e6)]


class GroupsInput(Schema):
    """Each replica of each stage trains `iteration_s`, is ready, is grouped, averages `average_s` (a group of one does
    not), and trains again. All begin at 0. iteration_s: a row a stage, a value a replica."""

    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    window_s: Seconds
    history: Annotated[int, Field(ge=1, le=1_000)]
    average_s: Seconds
    until_s: Seconds
    iteration_s: Annotated[tuple[tuple[Iteration, ...], ...], Field(min_length=1, max_length=MAX_STAGES)]

    @model_validator(mode="after")
    def _agrees(self) -> GroupsInput:
        for stage, times in enumerate(self.iteration_s):
            if len(times) != self.replicas:
                raise ValueError(
                    f"field iteration_s[{stage}] has {len(times)} times, and there are {self.replicas} replicas. Give "
                    "one for each"
                )
        most = sum(self.until_s / each for times in self.iteration_s for each in times)
        if most > MAX_ITERATIONS:
            raise ValueError(
                f"field until_s = {self.until_s:g} is up to {most:.0f} iterations; at most {MAX_ITERATIONS} are "
                "replayed. Lower it"
            )
        return self


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """members: replicas of `stage`, ascending, from 0."""

    stage: int
    formed_s: float
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupsPlan:
    """groups: in the order in which they were formed. iterations: how many each replica of each stage has trained.
    waits: a sentence for each stage whose groups waited, as in `atoll events`."""

    groups: tuple[FormedGroup, ...]
    iterations: tuple[tuple[int, ...], ...]
    waits: tuple[str, ...]


def plan_groups(given: GroupsInput) -> GroupsPlan:
    """Return every group formed until `until_s`, and the iterations that ended by then. At equal times, replicas are
    ready (by stage, by replica) before windows end."""
    rounds = GroupRounds.of(len(given.iteration_s), given.replicas, given.history)
    trained = [[0] * given.replicas for _ in given.iteration_s]
    ends = [
        (each, stage, replica) for stage, times in enumerate(given.iteration_s) for replica, each in enumerate(times)
    ]
    heapq.heapify(ends)
    groups: list[RoundGroup] = []
    while True:
        due_s = rounds.due_s
        if ends and (due_s is None or ends[0][0] <= due_s):
            now_s, stage, replica = ends[0]
        elif due_s is not None:
            now_s, stage, replica = due_s, -1, -1
        else:
            break
        if now_s > given.until_s:
            break
        if replica >= 0:
            heapq.heappop(ends)
            trained[stage][replica] += 1
            rounds, formed = ready(rounds, stage, replica, now_s, given.window_s)
        else:
            rounds, formed = passed(rounds, now_s)
        groups += formed
        for group in formed:
            goes_on_s = now_s + (given.average_s if len(group.members) > 1 else 0.0)
            for member in group.members:
                heapq.heappush(ends, (goes_on_s + given.iteration_s[group.stage][member], group.stage, member))
    told = tuple(FormedGroup(group.stage, group.formed_s, group.members) for group in groups)
    return GroupsPlan(told, tuple(tuple(counts) for counts in trained), _waits(groups, given))


def _waits(groups: list[RoundGroup], given: GroupsInput) -> tuple[str, ...]:
    stages = [StageWaits() for _ in given.iteration_s]
    for group in groups:
        stages[group.stage].add(group)
    told = [waits.in_words(stage, given.history) for stage, waits in enumerate(stages)]
    return tuple(sentence for sentence in told if sentence is not None)
