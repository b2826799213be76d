"""What a rank's own weights are worth to it beside the shared model, without another pass."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.strategies.shared_params import local_fit_gap as module
from atoll.strategies.shared_params.engine_tensors import EngineTensor, joined
from atoll.strategies.shared_params.layout import lay_out_for_updates
from atoll.strategies.shared_params.local_fit_gap import EVERY, NEEDED, SHARE, LocalFitGap


@dataclass
class SharedParams:
    """In place of the exchange: a model's tensors, and shared parameters that nobody changes."""

    model: nn.Module
    tensors: list[EngineTensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors = joined(self.model, lay_out_for_updates(self.model), pieces=1)

    def read_shared_param(self, tensor: EngineTensor) -> torch.Tensor:
        return tensor.shared_param.clone()


def measured(advantage: Any, model: nn.Module, batches: int = NEEDED, *, passes: int = 1, factor: float = 1.0) -> float:
    """After so many batches of exp(-sum of all weights), in `passes` each."""
    for _ in range(batches):
        model.zero_grad()
        for number in range(passes):
            loss = torch.exp(-sum(one.sum() for one in model.parameters())) / passes
            advantage.passes(loss.detach(), first=number == 0)
            (loss * factor).backward()
        advantage.measure(factor)
    return float(advantage.value)


@pytest.mark.parametrize(("passes", "factor"), [(1, 1.0), (3, 1.0), (1, 2.5)])
def test_of_a_loss_that_falls_exponentially_it_is_the_logarithm_of_both_losses_ratio(
    passes: int, factor: float
) -> None:
    """Own weights are ahead by 0.01 in each of 63 entries, large and small layers alike."""
    model = nn.Sequential(nn.Linear(4, 9), nn.Linear(2, 6))
    exchange = SharedParams(model)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.01)
    found = measured(LocalFitGap(exchange), model, passes=passes, factor=factor)  # type: ignore[arg-type]
    assert found == pytest.approx(0.01 * 63, rel=1e-4)


def test_a_shared_model_that_is_better_and_few_batches_say_nothing() -> None:
    model = nn.Linear(4, 4)
    advantage = LocalFitGap(SharedParams(model))  # type: ignore[arg-type]
    with torch.no_grad():
        model.weight += 0.1
    assert measured(advantage, model, NEEDED - 1) == 0.0
    assert measured(advantage, model, 1) > 1.0
    with torch.no_grad():
        model.weight -= 0.3
    assert measured(advantage, model) == 0.0


def test_what_is_not_known_or_no_number_is_left_out() -> None:
    model = nn.Linear(4, 4)
    advantage = LocalFitGap(SharedParams(model))  # type: ignore[arg-type]
    assert not advantage.is_due(EVERY + 1)
    advantage.passes(None, first=True)  # the script called loss.backward() itself
    advantage.passes(torch.tensor(1.0), first=False)
    assert not advantage.is_due(EVERY)
    for loss in (0.0, -1.0, math.nan, math.inf):
        for _ in range(NEEDED):
            advantage.passes(torch.tensor(loss), first=True)
            advantage.measure(1.0)
    assert advantage.value == 0.0


def test_it_takes_next_to_nothing_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second at each look: a real one may go on by more than 200 times what it took."""
    looks = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    model = nn.Linear(4, 4)
    advantage = LocalFitGap(SharedParams(model))  # type: ignore[arg-type]
    advantage.passes(torch.tensor(1.0), first=True)
    assert advantage.is_due(EVERY)
    advantage.measure(1.0)
    waited = next(look for look in itertools.count(1) if advantage.is_due(2 * EVERY))
    assert waited == 1 / SHARE  # two hundred times as long as it took
