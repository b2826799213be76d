"""The optimizer of a stage, numbered as that of the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.state import merged, pack_state, unpack_state
from atoll.agent.runtime.model.model_part import WholeNumbers

SIZES = ((2, 1), (1, 2))  # of two stages, two groups


def parameters(count: int, first: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), float(first + place))) for place in range(count)]


def test_states_of_stages_make_that_of_the_whole_and_come_back() -> None:
    """Saved by two stages, put together, and loaded by one process and by two stages again."""
    by_stage = [[parameters(2, 0), parameters(1, 3)], [parameters(1, 2), parameters(2, 4)]]
    together = [by_stage[0][0] + by_stage[1][0], by_stage[0][1] + by_stage[1][1]]

    def adam(groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": groups[0]}, {"params": groups[1], "lr": 0.5}])

    whole = adam(together)
    stages = [WholeNumbers(adam(groups), stage, SIZES) for stage, groups in enumerate(by_stage)]
    for one in [one for group in together for one in group]:
        one.grad = one.detach().clone()
    for stage in stages:
        stage._optimizer.step()  # type: ignore[attr-defined]
    whole.step()
    packs = [pack_state({"optimizer": stage.state_dict()}) for stage in stages]
    tensors = {name: one for found, _ in packs for name, one in found.items()}
    state = unpack_state(tensors, merged([scalars for _, scalars in packs]))["optimizer"]
    expected = whole.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert sorted(state["state"]) == list(expected["state"]) == list(range(6))
    for number, kept in expected["state"].items():
        assert torch.equal(state["state"][number]["step"], kept["step"])
    before = [copy.deepcopy(stage._optimizer.state_dict()) for stage in stages]
    for stage, own in zip(stages, before, strict=True):
        stage.load_state_dict(copy.deepcopy(state))
        after = stage._optimizer.state_dict()
        assert after["param_groups"] == own["param_groups"]
        for number, kept in own["state"].items():
            assert all(torch.equal(after["state"][number][name], one) for name, one in kept.items())
    with pytest.raises(ValueError, match=r"groups of \[2, 4\] parameters, the model's optimizer groups of \[3, 3\]"):
        stages[0].load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [2, 3, 4, 5]}]})
