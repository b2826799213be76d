"""After the engine took a gradient, using p.grad must be an error and not a zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.errors import BadInput
from atoll.strategies.stale_sparse.script_access import TakenGradient


def model() -> nn.Linear:
    made = nn.Linear(3, 4)
    for parameter in made.parameters():
        parameter.grad = TakenGradient.like(parameter)
    return made


@pytest.mark.parametrize(
    "use",
    [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
        lambda m: m.weight.grad.norm(),
        lambda m: m.weight.grad + 1,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1).step(),
    ],
)
def test_using_it_says_what_to_do_instead(use: Callable[[nn.Linear], object]) -> None:
    with pytest.raises(BadInput, match=r"run\.clip_grad_norm"):
        use(model())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_gradients_is_what_every_script_does_and_is_fine(set_to_none: bool) -> None:
    taken = model()
    torch.optim.SGD(taken.parameters(), lr=0.1).zero_grad(set_to_none=set_to_none)
    assert (taken.weight.grad is None) == set_to_none


def test_it_costs_no_memory() -> None:
    wide = nn.Parameter(torch.zeros(1000, 1000))
    with torch._C.DisableTorchFunctionSubclass():
        assert TakenGradient.like(wide).untyped_storage().nbytes() == 4


def test_it_can_be_printed() -> None:
    assert repr(model().weight.grad) == "TakenGradient()"
