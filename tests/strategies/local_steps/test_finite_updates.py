"""Updates with gradients that are not finite are left out, and optimizer state that is not finite begins anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from atoll.errors import NotFinite
from atoll.strategies.shared_params.finite_updates import (
    MOST_INCIDENTS,
    WINDOW_UPDATES,
    FiniteUpdates,
    Incidents,
    reset_state_not_finite,
)

Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=0.1),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1, momentum=0.9),
}


def pair() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_a_run_with_one_bad_gradient_is_plain_torch_without_that_step(make: Make, bad: float) -> None:
    """1e30 is finite, and its square, which moments are made of, is not."""
    ours, plain = pair(), pair()
    optimizer, theirs = make(ours), make(plain)
    found: list[str] = []
    finite = FiniteUpdates([optimizer], found.append)
    for step in range(6):
        for mine, other in zip(ours, plain, strict=True):
            mine.grad = torch.full_like(mine, 0.1 * (step + 1))
            other.grad = mine.grad.clone()
        if step == 3:
            assert ours[1].grad is not None
            ours[1].grad[2] = bad
        else:
            theirs.step()
        given = [one.grad for one in ours]
        optimizer.step()
        assert all(one.grad is gradient for one, gradient in zip(ours, given, strict=True))
    assert found == ["its update was left out, for the gradients of 1 of 2 parameters were not finite"]
    assert all(torch.equal(mine, other) for mine, other in zip(ours, plain, strict=True))
    finite.close()
    assert ours[1].grad is not None
    ours[1].grad[2] = bad
    optimizer.step()
    assert len(found) == 1


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_state_that_is_not_finite_begins_anew_as_a_fresh_optimizer_does(make: Make) -> None:
    ours, plain = pair(), pair()
    optimizer = make(ours)
    for _ in range(30):
        for one in ours:
            one.grad = torch.ones_like(one)
        optimizer.step()
    state = optimizer.state[ours[0]]
    next(one for one in state.values() if isinstance(one, torch.Tensor) and one.dim() > 0)[1, 1] = torch.inf
    kept = {name: one.clone() for name, one in optimizer.state[ours[1]].items()}
    assert reset_state_not_finite([optimizer]) == 1
    assert reset_state_not_finite([optimizer]) == 0
    assert all(torch.equal(one, optimizer.state[ours[1]][name]) for name, one in kept.items())
    fresh = make(plain)
    moved = []
    for weights, by in ((ours[0], optimizer), (plain[0], fresh)):
        with torch.no_grad():
            weights.zero_()
        weights.grad = torch.full_like(weights, 2.0)
        by.step()
        moved.append(weights.detach().clone())
    # NAdam's running product of momenta is not of the parameter's shape: its first steps are smaller, never larger.
    assert (moved[0].abs() <= 1.001 * moved[1].abs()).all()
    if not isinstance(optimizer, torch.optim.NAdam):
        torch.testing.assert_close(moved[0], moved[1])


def test_values_that_are_not_finite_again_and_again_stop_the_worker() -> None:
    reported: list[str] = []
    incidents = Incidents(3, reported.append)
    for number in range(3 * MOST_INCIDENTS):  # seldom enough
        incidents.add(number * WINDOW_UPDATES // (MOST_INCIDENTS - 1), "a loss was NaN")
    last = 3 * MOST_INCIDENTS * WINDOW_UPDATES
    for number in range(1, MOST_INCIDENTS):
        incidents.add(last + number, "a loss was NaN")
        incidents.add(last + number, "and its weights too")  # of the same update
    with pytest.raises(NotFinite, match=r"rank 3: values were not finite in 5 of the last 100 updates, now in update"):
        incidents.add(last + MOST_INCIDENTS, "a loss was NaN")
    assert len(reported) == 5 * MOST_INCIDENTS - 1
