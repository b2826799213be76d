"""Rules by which ready replicas are grouped, of those that SDPipe's is compared with. Pure: time is given."""

from __future__ import annotations

import random
from typing import Protocol

from atoll.controller.planners.pipelines.group_rounds import RoundGroup

Members = tuple[int, ...]


class StageRule(Protocol):
    """Grouping rule of one round of all stages. Methods return the new groups."""

    @property
    def due_s(self) -> float | None:
        """Return the latest time for a call of `passed`."""

    def ready(self, stage: int, replica: int, now_s: float) -> list[RoundGroup]: ...

    def done(self, stage: int, replica: int, now_s: float) -> list[RoundGroup]:
        """Record that a replica trains no more in this round."""

    def passed(self, now_s: float) -> list[RoundGroup]: ...


class GroupRule(Protocol):
    """Grouping rule of one round of whole replicas, without windows. Methods return the new groups."""

    def ready(self, replica: int) -> list[Members]: ...

    def done(self, replica: int) -> list[Members]:
        """Record that a replica trains no more in this round."""


class WholePipelines:
    """A StageRule for rules that know no stages: a pipeline is ready once all its stages are, and every stage has the
    same groups. So stages that wait for different partners cannot wait for each other."""

    due_s: float | None = None

    def __init__(self, rule: GroupRule, stages: int) -> None:
        self._rule, self._stages = rule, range(stages)
        self._ready: dict[int, set[int]] = {}  # by replica, stages
        self._done: set[int] = set()

    def ready(self, stage: int, replica: int, now_s: float) -> list[RoundGroup]:
        here = self._ready.setdefault(replica, set())
        here.add(stage)
        if len(here) < len(self._stages):
            return []
        here.clear()
        return self._of_all(self._rule.ready(replica), now_s)

    def done(self, stage: int, replica: int, now_s: float) -> list[RoundGroup]:
        if replica in self._done:
            return []
        self._done.add(replica)
        return self._of_all(self._rule.done(replica), now_s)

    def passed(self, now_s: float) -> list[RoundGroup]:
        return []

    def _of_all(self, formed: list[Members], now_s: float) -> list[RoundGroup]:
        return [RoundGroup(stage, now_s, members, "partners ready") for members in formed for stage in self._stages]


class RandomPairs:
    """AD-PSGD's: each averages with a partner drawn at random, and waits for it."""

    def __init__(self, replicas: int, seed: int) -> None:
        self._live = set(range(replicas))
        self._wants: dict[int, int] = {}  # of those that wait, in the order in which they came
        self._draw = random.Random(seed)

    def ready(self, replica: int) -> list[Members]:
        if replica not in self._live:
            return []
        wanted_by = next((other for other, wants in self._wants.items() if wants == replica), None)
        return self._paired(replica, wanted_by if wanted_by is not None else self._drawn(replica))

    def done(self, replica: int) -> list[Members]:
        self._live.discard(replica)
        self._wants.pop(replica, None)
        waiting = [other for other, wants in self._wants.items() if wants == replica]
        for other in waiting:
            del self._wants[other]
        return [group for other in waiting for group in self._paired(other, self._drawn(other))]

    def _drawn(self, replica: int) -> int:
        return self._draw.choice(sorted(self._live - {replica}) or [replica])

    def _paired(self, replica: int, partner: int) -> list[Members]:
        if partner == replica:
            return [(replica,)]  # nobody else is left
        if partner not in self._wants:
            self._wants[replica] = partner
            return []
        del self._wants[partner]
        return [(min(replica, partner), max(replica, partner))]


class Static:
    """Fixed groups of neighbours: each waits for its own. One group of all is the all-reduce."""

    def __init__(self, replicas: int, size: int) -> None:
        self._groups = [set(range(first, min(first + size, replicas))) for first in range(0, replicas, size)]
        self._ready: set[int] = set()

    def ready(self, replica: int) -> list[Members]:
        self._ready.add(replica)
        return self._whole()

    def done(self, replica: int) -> list[Members]:
        self._ready.discard(replica)
        for group in self._groups:
            group.discard(replica)
        return self._whole()

    def _whole(self) -> list[Members]:
        whole = [tuple(sorted(group)) for group in self._groups if group and group <= self._ready]
        self._ready.difference_update(*whole)
        return whole
