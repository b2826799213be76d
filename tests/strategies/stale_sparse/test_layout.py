from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.agent.runtime.model.memory_order import flat_view
from atoll.agent.runtime.strategy_interface.script_checks import Script
from atoll.errors import BadInput
from atoll.strategies.shared_params.engine_tensors import EngineTensor, forward_tensors
from atoll.strategies.stale_sparse.optimizer_rules import (
    Rates,
    adopt_optimizer_state,
    check_script,
    lay_out_for_gradients,
)
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.worker import pace_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.body[0].bias.requires_grad_(False)


def laid_out(model: nn.Module, optimizer: torch.optim.Optimizer, *, lazy: bool = True):
    return lay_out_for_gradients(model, optimizer, Rates(optimizer), lazy=lazy)


def test_layers_are_the_trained_parameters_once_each_in_the_models_order() -> None:
    model = Tied()
    layers = laid_out(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert [layer.name for layer in layers] == ["embed.weight", "body.0.weight", "body.2.weight", "body.2.bias"]
    assert [layer.order for layer in layers] == [0, 1, 2, 3]
    assert all(layer.first is not None and layer.second is None for layer in layers)
    tensors = [EngineTensor.of(layer) for layer in layers]
    held = {type(module).__name__: [one.name for one in own] for module, own in forward_tensors(model, tensors)}
    assert held["Embedding"] == ["embed.weight"]
    assert ["embed.weight"] in [
        [one.name for one in own] for module, own in forward_tensors(model, tensors) if module is model.head
    ]


def test_shared_params_are_copies_in_the_order_of_memory() -> None:
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    (weight, _) = laid_out(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(weight.shaped(weight.shared_param), model.weight)
    assert not torch.equal(weight.shared_param, model.weight.detach().reshape(-1)), "channels last is another order"
    weight.shared_param.add_(1)
    assert not torch.equal(weight.shaped(weight.shared_param), model.weight)


def test_16_bit_parameters_get_32_bit_shared_params() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    (weight, _) = laid_out(model, torch.optim.AdamW(model.parameters()))
    assert weight.shared_param.dtype == torch.float32
    assert torch.equal(weight.shaped(weight.shared_param).to(torch.bfloat16), model.weight)


@pytest.mark.parametrize(
    ("rate", "world_size", "blocks"), [(0.99, 2, 5), (0.9999, 4, 1), (0.0, 2, 1000), (0.5, 1, 500)]
)
def test_each_rank_keeps_its_part_of_what_the_sparsity_leaves(rate: float, world_size: int, blocks: int) -> None:
    model = nn.Linear(16, 1000, bias=False)
    (layer,) = laid_out(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert EngineTensor.of(layer).k_blocks(pace_of(rate, world_size).sent) == blocks


def test_gaps_and_overlaps_have_no_flat_view() -> None:
    assert flat_view(torch.zeros(4, 4)[:, :2]) is None
    assert flat_view(torch.zeros(1).expand(5)) is None
    assert flat_view(torch.zeros(4, 1, 3)) is not None
    assert flat_view(torch.zeros(3, 4).t()) is not None


def test_a_parameter_with_gaps_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(4, 4)[:2, :2])
    with pytest.raises(BadInput, match="parameter weight is torch.float32, 4 entries, strides"):
        check_script(StaleSparse(), Script(model=model, optimizers=[], engine_parts=None, device=torch.device("cpu")))


def test_moments_of_a_checkpoint_are_gone_on_from_and_seen_in_the_optimizers_state() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    expected = optimizer.state[model.weight]["exp_avg"].clone()
    updates = Rates(optimizer)
    layers = lay_out_for_gradients(model, optimizer, updates, lazy=True)
    assert adopt_optimizer_state(layers, optimizer, updates) == 1
    assert layers[0].first is not None
    assert torch.equal(layers[0].shaped(layers[0].first), expected)
    layers[0].first.add_(1)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], expected + 1)
