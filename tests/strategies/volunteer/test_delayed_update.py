from __future__ import annotations

import torch

from atoll.strategies.volunteer.delayed_update import DelayedUpdate


def of_two() -> tuple[torch.nn.Parameter, DelayedUpdate]:
    weight = torch.nn.Parameter(torch.zeros(2))
    return weight, DelayedUpdate([weight], torch.optim.SGD([weight], lr=1.0))


def test_a_steps_mean_over_its_samples_is_applied_one_step_later() -> None:
    weight, update = of_two()
    update.add(torch.tensor([2.0, 0.0]), 1)
    update.add(torch.tensor([2.0, 4.0]), 3)
    assert update.samples == 4
    update.end_step()
    assert weight.tolist() == [0.0, 0.0]
    update.add(torch.tensor([10.0, 10.0]), 10)
    update.end_step()
    assert weight.tolist() == [-1.0, -1.0]
    update.flush()
    update.flush()
    assert weight.tolist() == update.weights().tolist() == [-2.0, -2.0]


def test_what_is_discarded_of_a_step_takes_nothing_of_the_one_before() -> None:
    weight, update = of_two()
    update.add(torch.tensor([1.0, 1.0]), 1)
    update.end_step()
    update.add(torch.tensor([9.0, 9.0]), 1)
    update.discard()
    update.end_step()
    assert weight.tolist() == [-1.0, -1.0]
    update.end_step()
    assert weight.tolist() == [-1.0, -1.0]
