from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from atoll.errors import BadInput
from atoll.strategies.stale_sparse.optimizer_rules import Moments, Rates

Parameters = list[torch.nn.Parameter]


def parameters() -> Parameters:
    return [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("make", "rule", "rates", "moments"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "sgd", (0.1, 0, 0, 0, 0), Moments(None, None)),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            "nesterov",
            (0.1, 0.01, 0.9, 0, 0),
            Moments("momentum_buffer", None),
        ),
        (
            lambda p: torch.optim.Adam(p, lr=0.2, betas=(0.8, 0.9), eps=1e-6),
            "adam",
            (0.2, 0, 0.8, 0.9, 1e-6),
            Moments("exp_avg", "exp_avg_sq"),
        ),
        (
            lambda p: torch.optim.AdamW(p, lr=0.2),
            "adamw",
            (0.2, 0.01, 0.9, 0.999, 1e-8),
            Moments("exp_avg", "exp_avg_sq"),
        ),
    ],
)
def test_the_families_and_their_rates(
    make: Callable[[Parameters], torch.optim.Optimizer], rule: str, rates: tuple[float, ...], moments: Moments
) -> None:
    updates = Rates(make(parameters()))
    assert updates.rules == [rule]
    assert updates.rates() == [rates]
    assert updates.moments(0) == moments


def test_groups_are_read_at_every_step() -> None:
    first, second = parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}], momentum=0.9)
    updates = Rates(optimizer)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.05)
    assert [rates[0] for rates in updates.rates()] == [0.1, pytest.approx(0.05)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.Adagrad, "no sparse form of Adagrad; it knows SGD, Adam, AdamW"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "maximize": True}], lr=0.1),
            "maximize differs",
        ),
    ],
)
def test_what_has_no_sparse_form_is_refused(make: Callable[[Parameters], torch.optim.Optimizer], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Rates(make(parameters()))


def test_an_optimizer_of_the_users_own_is_refused_even_if_it_is_derived() -> None:
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(BadInput, match="no sparse form of Own"):
        Rates(Own(parameters(), lr=0.1))


def test_what_changes_the_rule_on_the_run_is_refused() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    updates = Rates(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(BadInput, match="group 0 of the optimizer turned momentum"):
        updates.rates()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.add_param_group({"params": parameters()})
    with pytest.raises(BadInput, match="got other parameters"):
        updates.rates()
