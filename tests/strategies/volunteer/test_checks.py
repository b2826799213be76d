from __future__ import annotations

import math
import random

import pytest
import torch

from atoll.strategies.volunteer.checks import Comparisons, NormBound, Suspicion, difference, of_content

WANTED = [((2, 3), torch.float32)]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (torch.zeros(2, 3), None),
        (torch.zeros(3, 2), Suspicion.SHAPE),
        (torch.zeros(2, 3, dtype=torch.float64), Suspicion.SHAPE),
        (torch.full((2, 3), math.nan), Suspicion.NUMBERS),
        (torch.full((2, 3), -math.inf), Suspicion.NUMBERS),
    ],
)
def test_content_that_cannot_be_is_named(answer: torch.Tensor, why: Suspicion | None) -> None:
    assert of_content([answer], WANTED) == why
    assert of_content([answer, answer], WANTED) == Suspicion.SHAPE
    assert of_content([], WANTED) == Suspicion.SHAPE


def test_a_norm_is_far_off_where_the_others_say_so() -> None:
    """Nothing is before eight answers; then ten times the median is, and one outlier that counted moves nothing."""
    bound = NormBound()
    assert not bound.exceeded(1e9)
    for norm in (1.0, 1.2, 0.9, 1.0, 1.1, 0.8, 1.0, 500.0):
        bound.learn(norm)
    assert not bound.exceeded(9.0)
    assert bound.exceeded(11.0)


def test_a_liar_with_gradients_of_the_right_size_is_out_within_fifty_tasks() -> None:
    """1,000 liars from their first answer on, out at their second, and 1,000 that are honest while they are new: all
    are out within 50 lies but for a few of the latter; of honest clients, whose sums are in another order, none."""
    draw = random.Random(1)
    found = Comparisons(draw)
    lies: list[int] = []
    for client in range(2000):
        honest = 8 if client >= 1000 else 0
        for answer in range(honest + 51):
            if found.due(str(client)) and found.compared(str(client), 1e-6 if answer < honest else 1.4):
                lies.append(answer + 1 - honest)
                break
    assert lies[:1000] == [2] * 1000
    assert len(lies) >= 1990
    assert sorted(lies)[1500] <= 12
    assert all(found.compared("honest", 1e-4) is None for _ in range(10_000) if found.due("honest"))


def test_two_that_differ_are_told_with_their_size() -> None:
    found = Comparisons(random.Random(1))
    assert found.compared("a", 0.2) is None
    assert found.due("a")  # after one that differs each is compared
    why = found.compared("a", 1.4)
    assert why is not None
    assert "2 of its 1 answers differ" in why
    assert "0.2, 1.4" in why
    found.forget("a")
    assert found.compared("a", 1.4) is None


def test_differences_are_relative_to_the_servers_own() -> None:
    own = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    assert difference(own, own) == 0.0
    assert difference([torch.tensor([3.0, 4.5]), torch.zeros(2)], own) == pytest.approx(0.1)
    assert difference([torch.ones(1)], [torch.zeros(1)]) == math.inf
