"""When islands tell each other of second moments and take the sums, where others' updates may come late."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from atoll.strategies.shared_params.second_moments import (
    BLOCK,
    MomentSync,
    SecondMoments,
    last_told,
    late_of,
    span_of,
    told_after,
)

ISLANDS, ENTRIES, STEPS = 3, 32 * BLOCK, 140
PLACES = torch.arange(ENTRIES)


@dataclass
class Sums:
    """What was begun by all ranks, the same one after the other on each."""

    begun: list[list[torch.Tensor]] = field(default_factory=list)
    rows: list[Sequence[int]] = field(default_factory=list)
    waited_at: list[tuple[int, int]] = field(default_factory=list)
    """Of a sum that was waited for: the update in which it began, and in which it had to be there."""
    now: int = 0


class Rank:
    """One rank's group: a sum is there once all have begun it, and is first asked for when it is waited for."""

    world_size = ISLANDS

    def __init__(self, sums: Sums) -> None:
        self._sums, self._next = sums, 0

    def gather_rows(self, row: Sequence[int]) -> list[Sequence[int]]:
        return [row] * ISLANDS  # all ranks of these tests have the same to say

    def begin_sum(self, piece: torch.Tensor, doing: str) -> Any:
        if self._next == len(self._sums.begun):
            self._sums.begun.append([])
        mine = self._sums.begun[self._next]
        mine.append(piece)
        self._next += 1
        return _UnderWay(self._sums, mine, self._sums.now)


@dataclass
class _UnderWay:
    sums: Sums
    pieces: list[torch.Tensor]
    begun_at: int

    def wait(self) -> None:
        assert len(self.pieces) == ISLANDS
        self.sums.waited_at.append((self.begun_at, self.sums.now))
        if not hasattr(self.pieces[0], "summed"):
            total = torch.stack(self.pieces).sum(0)
            for piece in self.pieces:
                piece.copy_(total)
                piece.summed = True  # type: ignore[attr-defined]


class Islands:
    """updates: that they made before; states: of their optimizers then."""

    def __init__(self, staleness: int, updates: int = 0, begun: int | None = None, states: Sequence[Any] = ()) -> None:
        self.staleness, self.updates, self.sums = staleness, updates, Sums()
        self.weights = [torch.nn.Parameter(torch.zeros(ENTRIES)) for _ in range(ISLANDS)]
        self.adams = [torch.optim.AdamW([one], lr=1e-3) for one in self.weights]
        for adam, state in zip(self.adams, states, strict=False):
            adam.load_state_dict(state)
        moments = [SecondMoments([adam], [one]) for adam, one in zip(self.adams, self.weights, strict=True)]
        self.told = [MomentSync(one, Rank(self.sums), leads=True) for one in moments]  # type: ignore[arg-type]
        self.sums.now = updates
        for one in self.told:
            one.begin(updates, begun)

    def train(self, until: int) -> Islands:
        while self.updates < until:
            self.updates += 1
            self.sums.now = self.updates
            for number, (weights, adam) in enumerate(zip(self.weights, self.adams, strict=True)):
                weights.grad = torch.sin(PLACES * (number + 1) + self.updates)
                adam.step()
            for one in self.told:
                one.updated(self.updates, 1 / ISLANDS, self.staleness)
        return self

    def states(self) -> list[Any]:
        return [copy.deepcopy(adam.state_dict()) for adam in self.adams]

    def seconds(self) -> list[torch.Tensor]:
        return [adam.state[one]["exp_avg_sq"] for adam, one in zip(self.adams, self.weights, strict=True)]


@pytest.mark.parametrize("asked", [0, 1, 15, 1000])
def test_a_sum_is_taken_before_islands_tell_each_other_again(asked: int) -> None:
    tells = [updates for updates in range(1000) if told_after(updates)]
    assert tells[:5] == [8, 16, 32, 64, 128]
    for told in tells:
        taken = told + span_of(told) + late_of(told, asked)
        assert taken <= min(updates for updates in [*tells, 1024] if updates > told)
        assert 0 <= taken - told - span_of(told) <= asked


@pytest.mark.parametrize(("staleness", "least"), [(0, 1), (1, 1), (6, 8)])
def test_each_sum_has_as_long_as_its_ways_take(staleness: int, least: int) -> None:
    """Six steps late, a ring of three is four ways where an exchange is two: ten more updates, but for the first two
    sums, before which there is no time."""
    islands = Islands(staleness).train(STEPS)
    spans = [waited - begun for begun, waited in islands.sums.waited_at]
    assert min(spans) == least
    late = [waited - begun for begun, waited in islands.sums.waited_at if last_told(begun) >= 32]
    assert min(late) >= 11 if staleness == 6 else min(late) == 1


@pytest.mark.parametrize(("staleness", "stopped_after"), [(1, 20), (1, 100), (6, 10), (6, 33), (6, 56), (6, 105)])
def test_who_goes_on_takes_the_same_sum_after_the_same_update(staleness: int, stopped_after: int) -> None:
    """Also between the updates after which it would have been taken and after which it is."""
    calm = Islands(staleness).train(112)
    states = Islands(staleness).train(stopped_after).states()
    resumed = Islands(staleness, stopped_after, 0, states)
    assert [one.begun for one in resumed.told] == [0] * ISLANDS
    for one, other in zip(calm.seconds(), resumed.train(112).seconds(), strict=True):
        assert torch.equal(one, other)


def test_a_plan_that_lets_updates_come_later_holds_from_the_next_time_that_islands_tell() -> None:
    islands = Islands(1).train(63)
    islands.staleness = 6
    islands.train(STEPS)
    taken = sorted({waited for _, waited in islands.sums.waited_at})
    assert taken == [16, 24, 48, 64 + 32 + 10]
