"""The layers of a model that is cut: made alone as they would be made together, refused by name where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.cutting import cut, plan_stages_of, split_by_name
from atoll.agent.runtime.pipeline.layers import Layers
from atoll.agent.runtime.pipeline.measuring import LayerCost, measured
from atoll.agent.runtime.session.throttle import Throttle
from atoll.errors import BadInput


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Backwards(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            inputs = layer(inputs)
        return inputs


def on_meta(*layers: type[nn.Module]) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2), *(layer() for layer in layers))


def test_a_stage_alone_has_the_layers_of_the_whole_model() -> None:
    whole = Layers.of(on_meta()).stage(0, 2, seed=3).state_dict()
    alone = Layers.of(on_meta()).stage(1, 2, seed=3).state_dict()
    assert list(alone) == [name for name in whole if name.startswith("1.")]
    assert all(torch.equal(one, whole[name]) for name, one in alone.items())
    other = Layers.of(on_meta()).stage(1, 2, seed=4).state_dict()
    assert not torch.equal(other["1.in_proj_weight"], alone["1.in_proj_weight"])
    assert (
        Layers.of(on_meta()).fingerprint.digest
        == Layers.of([lambda: on_meta()[0], lambda: on_meta()[1]]).fingerprint.digest
    )


def test_parameters_that_one_stage_shares_stay_one() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0][1].weight = model[0][0].weight  # type: ignore[index]
    layers = Layers.of(model)
    layers.refuse_tied((0, 1))
    made = layers.stage(0, 1, seed=0)
    first, second = made.get_submodule("0.0"), made.get_submodule("0.1")
    assert first.weight is second.weight
    assert not first.weight.is_meta
    model[1].weight = model[0][0].weight  # type: ignore[index]
    with pytest.raises(BadInput, match=r"0\.0\.weight and 1\.weight are one parameter, and lie in stages 0 and 1"):
        Layers.of(model).refuse_tied((0, 1))


def tied_on_meta() -> nn.Sequential:
    """Its first and its last layer have one weight, as an embedding and a language model's head."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def test_a_parameter_of_two_stages_is_refused_though_layers_were_measured_before() -> None:
    """Measuring made the layers of the meta device in place, each with a weight of its own: two stages then trained two
    copies, and nobody was told."""
    layers = Layers.of(tied_on_meta())
    measured(layers, torch.zeros(2, 4), 0, torch.device("cpu"), Throttle(1.0))
    with pytest.raises(BadInput, match=r"0\.weight and 2\.weight are one parameter, and lie in stages 0 and 1\. Untie"):
        layers.refuse_tied((0, 1))
    embedding, head = nn.Embedding(4, 4), nn.Linear(4, 4)
    head.weight = nn.Parameter(embedding.weight.data)  # another parameter in the same memory
    with pytest.raises(BadInput, match=r"0\.weight and 1\.weight are one parameter"):
        Layers.of([embedding, head]).refuse_tied((0, 1))


def test_a_parameter_that_two_layers_of_one_stage_share_stays_one() -> None:
    """Each layer of the meta device is made by itself: they had a weight each."""
    layers = Layers.of(tied_on_meta())
    layers.refuse_tied((0,))
    made = layers.stage(0, 3, seed=0)
    assert made.get_submodule("0").weight is made.get_submodule("2").weight
    assert len(list(made.parameters())) == 3


def test_a_layer_that_stands_in_the_model_twice_runs_twice() -> None:
    """torch lists the children of a model without repetitions, and the second activation was left out of it."""
    act, both = nn.Tanh(), nn.Linear(4, 4)
    model = nn.Sequential(both, act, both, act)
    expected = model(torch.ones(1, 4))
    for given in (model, list(model)):
        layers = Layers.of(given)
        assert len(layers) == 4
        whole = layers.stage(0, 4, seed=0)
        assert torch.equal(whole(torch.ones(1, 4)), expected)
        assert list(whole.state_dict()) == list(model.state_dict())
    with pytest.raises(BadInput, match=r"0\.weight and 2\.weight are one parameter"):
        Layers.of(model).refuse_tied((0, 2))
    on_meta_twice = nn.Sequential(*[on_meta()[0]] * 2)
    made = Layers.of(on_meta_twice).stage(0, 2, seed=0)
    assert made.get_submodule("0") is made.get_submodule("1")


def test_what_has_no_layers_or_no_first_values_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="a Linear cannot be cut into stages"):
        Layers.of(nn.Linear(4, 4))
    with pytest.raises(BadInput, match="a Backwards cannot be cut into stages.*without a forward of its own"):
        Layers.of(Backwards(nn.Linear(4, 4), nn.Tanh()))
    with pytest.raises(BadInput, match="what makes layer 0 gave a int"):
        _ = Layers.of([lambda: 3]).described  # type: ignore[list-item, return-value]
    with pytest.raises(BadInput, match=r"layer 2 \(Own\) is on the meta device, has parameters or buffers of its own"):
        Layers.of(on_meta(Own)).stage(2, 3, seed=0)


def test_stages_that_are_named_have_to_fit() -> None:
    layers = Layers.of([nn.Tanh()] * 4)
    assert split_by_name(layers, ["1", "3"], 3) == (0, 1, 3)
    for split_at, stages, said in (
        (["2", "3"], 2, "makes 3 stages, and the job has 2"),
        (["3", "1"], 3, "in the model's order"),
        (["9"], 2, "split_at names '9', and the model's layers are 0, 1, 2, 3"),
    ):
        with pytest.raises(BadInput, match=said):
            split_by_name(layers, split_at, stages)


def test_slower_devices_get_fewer_layers_and_all_pipelines_one_cut() -> None:
    """Two pipelines of devices 1 : 0.5, the second one half as fast as the first as a whole."""
    layers, place = Layers.of([nn.Linear(4, 4)] * 6), StagePlace(0, stages=2, pipelines=2)
    of = [[LayerCost(factor, 2 * factor, 8, 8)] * 6 for factor in (1.0, 2.0, 2.0, 4.0)]
    assert plan_stages_of(layers, place, of, [10**9] * 4) == (0, 4)
    with pytest.raises(BadInput, match="the model cannot be cut into 2 stages: no cut fits the memory"):
        plan_stages_of(layers, place, of, [10**9, 100, 10**9, 10**9])


def test_stages_without_a_layer_each_are_refused() -> None:
    session: Any = None  # nothing was asked of it
    with pytest.raises(BadInput, match="3 stages need as many layers; the model has 2"):
        cut(session, StagePlace.of(0, 3, 3), Layers.of([nn.Tanh()] * 2), None, lambda: None)


def test_workers_make_up_whole_pipelines() -> None:
    with pytest.raises(BadInput, match="3 workers make up no whole pipelines of 2 stages"):
        StagePlace.of(0, 3, 2)
    places = [StagePlace.of(rank, 6, 2) for rank in range(6)]
    assert sorted((one.pipeline, one.stage) for one in places) == [(n, m) for n in range(3) for m in range(2)]
    assert (places[3].mates, places[3].replicas) == ((2, 3), (1, 3, 5))
