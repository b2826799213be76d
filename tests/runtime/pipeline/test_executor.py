"""Two stages of a pipeline in one process: what goes through them, and what is refused."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from atoll.agent.runtime.data import to_device
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.executor import MicroBatch, StageExecutor, clip_over_stages
from atoll.agent.runtime.pipeline.wire import StageLinks, StagePurpose
from atoll.agent.runtime.session.throttle import Throttle
from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput

Loss = Callable[[Any, Any], torch.Tensor]


def never(outputs: Any, targets: Any) -> torch.Tensor:
    raise AssertionError("a stage that is not the last one has no loss")


def linked(change: Callable[[StagePurpose, torch.Tensor], torch.Tensor] | None = None) -> list[StageLinks]:
    """Two stages, whose messages arrive at once. change: of what is sent."""
    links: list[StageLinks] = []

    class Changing(StageLinks):
        def send(self, purpose: StagePurpose, batch: int, micro: int, tensor: torch.Tensor) -> None:
            super().send(purpose, batch, micro, tensor if change is None else change(purpose, tensor))

    def deliver(origin: int) -> Callable[[int, int, int, int, bytes | memoryview], None]:
        def send(to: int, round_: int, batch: int, micro: int, payload: bytes | memoryview) -> None:
            assert links[to].mailbox.deliver(Kind.DIRECT, origin, round_, batch, micro, payload) is None

        return send

    for rank in range(2):
        links.append(Changing(StagePlace.of(rank, 2, 2), deliver(rank), deadline_s=60))
        links[rank].begin(0)
    return links


def executed(links: list[StageLinks], stages: list[nn.Module], batches: list[tuple[Any, Any]], loss: Loss) -> float:
    """A batch of these micro-batches. Returns the last stage's loss, and raises what the first one raised."""
    micros = [MicroBatch(1 / len(batches), lambda one=one: one) for one in batches]  # type: ignore[misc]
    first, last = (
        StageExecutor(stage, own, one, torch.device("cpu"), Throttle(1.0))
        for stage, own, one in zip(stages, (never, loss), links, strict=True)
    )
    told: list[float] = []
    thread = threading.Thread(target=lambda: told.append(last.run(micros)))
    thread.start()
    try:
        first.run(micros)
    finally:
        thread.join(timeout=60)
    return told[0]


def test_micro_batches_of_other_shapes_train_as_in_one_process_and_the_last_stage_alone_has_a_loss() -> None:
    torch.manual_seed(1)
    stages: list[nn.Module] = [nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))]
    alone = copy.deepcopy(nn.Sequential(*stages))
    shapes = [(5, 4), (2, 7, 4), (1, 4)]
    batches = [(torch.randn(shape), torch.randn(*shape[:-1], 3)) for shape in shapes]
    loss = executed(linked(), stages, batches, nn.functional.mse_loss)
    expected = sum(nn.functional.mse_loss(alone(inputs), targets) / len(batches) for inputs, targets in batches)
    assert isinstance(expected, torch.Tensor)
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for mine, its in zip(nn.Sequential(*stages).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_losses_are_read_once_a_batch_and_what_comes_goes_through_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. On a GPU each micro-batch's loss was read as its pass was queued: the host waited for the device before the
    next one. 2. Activations were copied from pageable memory, which waits too. The stand-in for a device is the CPU."""
    torch.manual_seed(2)
    stages: list[nn.Module] = [nn.Linear(4, 8), nn.Linear(8, 3)]
    batches = [(torch.randn(5, 4), torch.randn(5, 3)) for _ in range(3)]
    whole = nn.Sequential(*copy.deepcopy(stages))
    expected = sum((nn.functional.mse_loss(whole(one), other) * (1 / 3)).item() for one, other in batches)
    pinned: list[torch.Tensor] = []

    def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(torch.empty_like(tensor))
        return pinned[-1]

    def reads(_: torch.Tensor) -> float:
        raise AssertionError("a number was read between two passes")

    monkeypatch.setattr(to_device, "_COPYING_DEVICES", {"cpu"})
    monkeypatch.setattr(to_device, "_pinned_like", pinned_like)
    monkeypatch.setattr(torch.Tensor, "item", reads)
    loss = executed(linked(), stages, batches, nn.functional.mse_loss)
    assert loss == expected
    assert sorted(tuple(one.shape) for one in pinned) == [(5, 8)] * 6  # three outputs, and their gradients


class Remembering(nn.Module):
    """A layer with dropout, whose activations may be computed again in the backward pass in place of being kept."""

    def __init__(self, *, again: bool, dropout: float = 0.5) -> None:
        super().__init__()
        self.layer, self._again = nn.Sequential(nn.Linear(4, 64), nn.Dropout(dropout)), again

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made = checkpoint(self.layer, inputs, use_reentrant=False) if self._again else self.layer(inputs)
        assert isinstance(made, torch.Tensor)
        return made


def test_dropout_draws_the_same_where_activations_are_computed_again() -> None:
    """By 1F1B other micro-batches have drawn since: each has its own masks again."""
    gradients = []
    for again in (False, True):
        torch.manual_seed(1)
        stages: list[nn.Module] = [Remembering(again=again), nn.Linear(64, 3)]
        batches = [(torch.randn(5, 4, requires_grad=True), torch.randn(5, 3)) for _ in range(4)]
        torch.manual_seed(2)
        executed(linked(), stages, batches, nn.functional.mse_loss)
        gradients.append([one.grad for one in nn.Sequential(*stages).parameters()])
    for kept, made_again in zip(*gradients, strict=True):
        torch.testing.assert_close(made_again, kept)


@pytest.mark.parametrize(("again", "low"), [(False, False), (True, False), (False, True), (True, True)])
def test_passes_made_ahead_have_the_weights_of_then_in_both_directions(*, again: bool, low: bool) -> None:
    """1. Two batches of three micro-batches, an update after each. The first stage makes the second batch's first
    forward pass before the first one's update. 2. That micro-batch's gradient is of the weights before it, also where
    activations are computed again in the backward pass; the others' of those after it. 3. Both stages end with the
    weights of that, worked out in one process. low: all of it is in one region of torch.autocast, which caches casts of
    weights until it ends; plain PyTorch has one for each forward pass."""
    torch.manual_seed(1)
    stages: list[nn.Module] = [nn.Sequential(nn.LayerNorm(4), Remembering(again=again, dropout=0.0)), nn.Linear(64, 3)]
    alone = copy.deepcopy(stages)
    batches = [[(torch.randn(5, 4, requires_grad=again), torch.randn(5, 3)) for _ in range(3)] for _ in range(2)]
    links = linked()

    def train(rank: int) -> None:
        executor = StageExecutor(stages[rank], nn.functional.mse_loss, links[rank], torch.device("cpu"), Throttle(1.0))
        optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.5)
        all_micros = [[MicroBatch(1 / 3, lambda one=one: one) for one in batch] for batch in batches]  # type: ignore[misc]
        left = [0, 1]

        def ahead() -> list[MicroBatch]:
            number = links[rank].know_ahead(lambda: left.pop(0) if left else None)
            return all_micros[number] if number is not None else []

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            while (
                number := links[rank].agree_on_batch(lambda none_now: left.pop(0) if left else None, lambda: None)
            ) is not None:
                optimizer.zero_grad()
                executor.run(all_micros[number], ahead)
                optimizer.step()

    thread = threading.Thread(target=train, args=(1,))
    thread.start()
    train(0)
    thread.join(timeout=60)

    optimizer, before = torch.optim.SGD(nn.Sequential(*alone).parameters(), lr=0.5), copy.deepcopy(alone[0])
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        for micro, (inputs, targets) in enumerate(batch):
            first = before if (number, micro) == (1, 0) else alone[0]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                loss = nn.functional.mse_loss(alone[1](first(inputs)), targets)
            (loss / 3).backward()  # type: ignore[no-untyped-call]
        for its, of_then in zip(alone[0].parameters(), before.parameters(), strict=True):
            if its.grad is not None and of_then.grad is not None:
                its.grad += of_then.grad
        optimizer.step()
    for mine, its in zip(nn.Sequential(*stages).parameters(), nn.Sequential(*alone).parameters(), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize(("max_norm", "scale"), [(0.1, 1.0), (1e6, 1.0), (0.1, math.nan)])
def test_clipping_over_two_stages_is_that_of_one_process(max_norm: float, scale: float) -> None:
    torch.manual_seed(1)
    stages = [nn.Linear(4, 8), nn.Linear(8, 3)]
    for one in nn.Sequential(*stages).parameters():
        one.grad = scale * torch.randn_like(one)
    whole = copy.deepcopy(nn.Sequential(*stages))
    for mine, its in zip(nn.Sequential(*stages).parameters(), whole.parameters(), strict=True):
        its.grad = None if mine.grad is None else mine.grad.clone()
    expected = float(nn.utils.clip_grad_norm_(whole.parameters(), max_norm))
    links, norms = linked(), dict[int, float]()

    def clip(rank: int) -> None:
        norms[rank] = clip_over_stages(stages[rank].parameters(), max_norm, links[rank])

    thread = threading.Thread(target=clip, args=(1,))
    thread.start()
    clip(0)
    thread.join(timeout=60)
    assert norms == pytest.approx({0: expected, 1: expected}, nan_ok=True)
    for mine, its in zip(nn.Sequential(*stages).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, equal_nan=True)


def test_autocast_without_scaled_gradients_is_refused_by_name() -> None:
    batches = [(torch.randn(5, 4), torch.randn(5, 3))]
    alone = StageExecutor(
        nn.Linear(4, 3),
        nn.functional.mse_loss,
        StageLinks(StagePlace.of(0, 1, 1), lambda *_: None, deadline_s=60),
        torch.device("cpu"),
        Throttle(1.0),
    )
    micros = [MicroBatch(1.0, lambda: batches[0])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert alone.run(micros) > 0
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(BadInput, match=r"float16 needs .* dtype=torch\.bf"):
        alone.run(micros)


def test_a_gradient_of_another_shape_than_the_output_is_refused_by_name() -> None:
    def cut_short(purpose: StagePurpose, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:1] if purpose is StagePurpose.BACKWARD else tensor

    batches = [(torch.randn(5, 4), torch.randn(5, 3))]
    with pytest.raises(BadInput, match=r"gradient of a stage's output came as torch.float32 \(1, 8\), the output is"):
        executed(linked(cut_short), [nn.Linear(4, 8), nn.Linear(8, 3)], batches, nn.functional.mse_loss)
