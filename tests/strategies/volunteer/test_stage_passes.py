"""Passes of a stage, as a server and its volunteers make them, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from atoll.agent.runtime.api.engine_inputs import engine_parts
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.agent.runtime.pipeline.script_autocast import ScriptAutocast
from atoll.agent.runtime.session.throttle import Throttle
from atoll.errors import BadInput
from atoll.strategies.volunteer.stage_passes import StagePass, StagePasses, UnsentState

SAMPLES = 8  # a power of two: sums and means over them round alike
inputs, targets = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 3)
NUMBERS = torch.arange(SAMPLES)


def passes(stage: nn.Module, *, first: bool = True, last: bool = True, device: str = "cpu") -> StagePasses:
    session: Any = SimpleNamespace(seed=7, device=torch.device(device), throttle=Throttle(1.0))
    parts = engine_parts(
        StagePlace(0, 1, 1),
        TensorDataset(inputs, targets),
        functional.mse_loss,
        torch.utils.data.default_collate,
        batch_size=SAMPLES,
        micro_batches=1,
        shuffle=False,
        clip_norm=None,
    )
    return StagePasses(session, stage, parts, first=first, last=last)


def task(direction: Direction, *, step: int = 0, made_here: bool = False, bfloat16: bool = False) -> StagePass:
    return StagePass(direction, step, 0, 0, SAMPLES, draws=3, made_here=made_here, bfloat16=bfloat16)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_updates_inside_one_region_of_the_script_are_those_of_plain_pytorch(*, bfloat16: bool) -> None:
    """1. Two stages train three steps inside one region of torch.autocast, which caches the casts of weights until it
    ends. Each step first makes a forward pass without a gradient, as a server that compares an answer does. 2. In plain
    PyTorch the region is around the forward pass and the loss. 3. Gradients and losses are equal."""
    torch.manual_seed(1)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)]
    plain = copy.deepcopy(nn.Sequential(*stages))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = []
    for _ in range(3):
        plain_optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            loss = functional.mse_loss(plain(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        expected.append((loss.item(), [copy.deepcopy(one.grad) for one in plain.parameters()]))
        plain_optimizer.step()
    front, rear = passes(stages[0], last=False), passes(stages[1], first=False)
    optimizer = torch.optim.SGD([*front.parameters, *rear.parameters], lr=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        autocast = ScriptAutocast.current("cpu")
        for step, (its_loss, its_gradients) in enumerate(expected):
            with autocast.left():
                front.begin(step, 0)
                forward = task(Direction.FORWARD, step=step, bfloat16=autocast.enabled)
                front.compute(forward, [NUMBERS])
                (activations,) = front.compute(forward, [NUMBERS], keep=True)
                backward = task(Direction.BACKWARD, step=step, bfloat16=autocast.enabled)
                gradient, loss, of_activations = rear.compute(backward, [activations, NUMBERS])
                rear.set_gradient(gradient / SAMPLES)
                kept = task(Direction.BACKWARD, step=step, made_here=True, bfloat16=autocast.enabled)
                front.set_gradient(front.compute(kept, [of_activations])[0] / SAMPLES)
            assert loss.item() / SAMPLES == pytest.approx(its_loss, rel=1e-5)
            for mine, its in zip([*front.parameters, *rear.parameters], its_gradients, strict=True):
                torch.testing.assert_close(mine.grad, its, rtol=1e-4, atol=1e-6)
            optimizer.step()


class Drawing(nn.Module):
    """A layer that may draw random numbers on its way."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self._draw = nn.Linear(4, 3), draw

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        drawn: torch.Tensor = self.linear(self._draw(given))
        return drawn


def attended(given: torch.Tensor, dropout: float) -> torch.Tensor:
    row = given.reshape(1, 1, SAMPLES, 4)
    return functional.scaled_dot_product_attention(row, row, row, dropout_p=dropout).reshape(SAMPLES, 4)


@pytest.mark.parametrize(
    ("draw", "drew"),
    [
        (nn.Dropout(0.5), True),
        (nn.Dropout(0.5).eval(), False),
        (nn.Dropout(0.0), False),
        (lambda given: functional.dropout(given, 0.5), True),
        (lambda given: functional.alpha_dropout(given, 0.5, training=True), True),
        (lambda given: attended(given, 0.5), True),
        (lambda given: attended(given, 0.0), False),
        (lambda given: given + torch.randn_like(given), True),
        (lambda given: given, False),
    ],
)
def test_a_pass_tells_whether_it_drew_random_numbers_and_draws_the_same_when_it_is_made_again(
    draw: Callable[[torch.Tensor], torch.Tensor], *, drew: bool
) -> None:
    """By modules, functions and attention alike: it is seen at the generator. A backward pass whose activations are
    computed again has the masks of before."""
    torch.manual_seed(1)
    made = passes(Drawing(draw), last=False)
    made.compute(task(Direction.FORWARD), [NUMBERS], keep=True)
    assert made.drew is drew
    gradient = torch.randn(SAMPLES, 3)
    torch.rand(5)
    (kept,) = made.compute(task(Direction.BACKWARD, made_here=True), [gradient])
    (again,) = made.compute(task(Direction.BACKWARD), [NUMBERS, gradient])
    assert made.drew is drew
    torch.testing.assert_close(again, kept)


def test_dropout_whose_random_numbers_cannot_be_drawn_again_is_refused_by_name() -> None:
    for layers, dropout in ((1, 0.0), (2, 0.0)):
        passes(nn.GRU(4, 3, num_layers=layers, dropout=dropout), device="cuda")
    passes(nn.LSTM(4, 3, num_layers=2, dropout=0.5))
    with pytest.raises(BadInput, match=r"cuDNN's dropout between the layers of an RNN .* Use dropout=0 there"):
        passes(nn.LSTM(4, 3, num_layers=2, dropout=0.5), device="cuda")


def test_autocast_in_float16_is_refused_by_name() -> None:
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(BadInput, match=r"in float16 needs .* dtype=torch\.b"),
    ):
        ScriptAutocast.current("cpu")


def test_the_gradient_of_a_layer_that_was_frozen_since_is_left_out() -> None:
    """1. A script freezes a layer after some steps. 2. The volunteer's script does not run on, so its answer has a
    gradient of that layer: it was taken for a lie, or moved the layer."""
    here, there = (passes(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))) for _ in range(2))
    there.load(here.weights())
    for parameter in here.parameters[:2]:
        parameter.requires_grad_(False)
    own, answer = (one.compute(task(Direction.BACKWARD), [NUMBERS])[0] for one in (here, there))
    assert not torch.equal(answer, own)
    assert torch.equal(here.without_frozen(answer), own)
    here.set_gradient(answer)
    assert [one.grad is None for one in here.parameters] == [True, True, False, False]


def test_what_the_script_writes_to_state_that_volunteers_are_not_sent_is_named() -> None:
    """1. The same values again, as a resume writes them, are no change. 2. Trained parameters are sent. 3. A frozen
    parameter, a buffer and a layer's mode are not."""
    model = nn.Sequential(nn.Linear(4, 3), Counting(persistent=True))
    model[0].weight.requires_grad_(False)
    here = UnsentState(model, passes(model).parameters)
    with torch.no_grad():
        model[0].bias.add_(1)
        model[0].weight.mul_(1)
    assert here.rewritten() == []
    with torch.no_grad():
        model[0].weight.add_(1)
    model[1].count += 1
    assert here.rewritten() == ["0.weight", "1.count"]
    model[1].eval()
    assert here.rewritten() == ["0.weight", "1.count", "1.layer.training", "1.training"]


class Counting(nn.Module):
    """Counts its forward passes."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_forward_pass_that_writes_the_state_is_refused_by_name() -> None:
    """1. A helper makes a pass in the rank's place. 2. What the pass wrote would stay with the helper, and be missing
    in the rank's checkpoint and in its next pass. 3. What is no state may be written: a cache of masks, for one."""
    backward, given = task(Direction.BACKWARD), [NUMBERS]
    passes(Counting(persistent=False)).compute(backward, given)
    with pytest.raises(BadInput, match=r"the forward pass wrote count of the model"):
        passes(Counting(persistent=True)).compute(backward, given)
    normalized = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    with pytest.raises(BadInput, match=r"the forward pass wrote parametrizations.weight.0._u, .*_v of the model"):
        passes(normalized).compute(backward, given)
