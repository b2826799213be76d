"""Small layers that the exchange engine has as one tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll.agent.runtime.transport.frames import Kind
from atoll.kernels.exchange_engine import RecentPart
from atoll.strategies.shared_params import residuals
from atoll.strategies.shared_params.engine_tensors import EngineTensor, forward_tensors, joined
from atoll.strategies.shared_params.layout import lay_out_for_updates


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 400), nn.LayerNorm(400), nn.Linear(400, 3))


def tensors_of(model: nn.Module, pieces: int = 4) -> list[EngineTensor]:
    return joined(model, lay_out_for_updates(model), pieces)


def names(tensors: list[EngineTensor]) -> list[list[str]]:
    return [[layer.name for layer in one.layers] for one in tensors]


def test_small_neighbours_are_one_tensor_and_large_ones_their_own() -> None:
    tensors = tensors_of(network())
    assert names(tensors) == [
        ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias", "3.weight", "3.bias", "4.weight", "4.bias"],
        ["2.weight"],
    ]
    assert tensors[0].name == "0.weight and 8 behind it"


def test_training_sees_the_same_weights_in_other_memory() -> None:
    model, twin = network(), network()
    (first, *_) = tensors_of(model)
    inputs = torch.randn(5, 20)
    assert torch.equal(model(inputs), twin(inputs))
    first.live.zero_()
    assert not model[0].weight.any()
    assert model[2].weight.any()
    for layer, part in first.parts(first.shared_param):
        assert torch.equal(layer.shaped(part), dict(twin.named_parameters())[layer.name])
        assert layer.at % 16 == 0
        assert layer.parameter.data_ptr() % 64 == 0


def test_a_second_time_the_same_layers_are_joined() -> None:
    """Who stays in a run is laid out again, beside one who has just begun."""
    stays = network()
    tensors_of(stays, 3)
    assert names(tensors_of(stays)) == names(tensors_of(network()))


@pytest.mark.parametrize("shared", ["with a buffer", "of one vector", "in shared memory"])
def test_memory_that_others_look_at_stays_where_it_is(shared: str) -> None:
    model = network()
    if shared == "with a buffer":
        model.register_buffer("seen", model[1].weight.detach())
    elif shared == "of one vector":
        vector = torch.zeros(60)
        model[1].weight.data, model[1].bias.data = vector[:30], vector[30:]
    else:
        model[1].share_memory()
    before = model[1].weight.data_ptr()
    assert ["1.weight"] in names(tensors_of(model))
    assert model[1].weight.data_ptr() == before


def test_types_are_not_mixed() -> None:
    model = network()
    model[1].to(torch.bfloat16)
    assert ["1.weight", "1.bias"] in names(tensors_of(model))


def test_a_module_asks_once_for_what_it_shares() -> None:
    model = network()
    tensors = tensors_of(model)
    held = {type(module).__name__: own for module, own in forward_tensors(model, tensors)}
    assert held["LayerNorm"] == [tensors[0]]


def test_a_part_of_several_layers_is_kept_by_layer() -> None:
    tensors = tensors_of(network())
    tensors[0].given(0, None, None)
    bias = tensors[0].layers[1]
    first = bias.at // 16
    index = np.array([0, first - 1, first, first + 1], np.uint32)
    values = np.arange(64, dtype=np.float32).reshape(4, 16)
    rows = residuals.as_rows(tensors[:1], [RecentPart(Kind.PART, 3, 0, index, values)])
    assert [(row["name"], row["index"].tolist()) for row in rows] == [("0.weight", [0, first - 1]), ("0.bias", [0, 1])]
    assert rows[1]["values"][0].tolist() == values[2].tolist()


def test_an_aggregators_sum_is_seen_by_layer() -> None:
    (first, *_) = tensors_of(network())
    total = torch.arange(float(first.shared_param.numel()))
    first.given(5, total, None)
    assert all(layer.number == 5 for layer in first.layers)
    bias = first.layers[1]
    assert bias.aggregator_sum is not None
    assert bias.aggregator_sum.tolist() == [float(bias.at + k) for k in range(30)]
