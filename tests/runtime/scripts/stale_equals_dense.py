"""Strategy stale-sparse that leaves nothing out and waits for every step trains what strategy dense trains.

Started on 2 or 3 ranks with a port for each run. Batches of 7 and a last of 1 make unequal parts, empty ones too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from several_runs import check_all_ranks_have, masters, opened
from torch import nn

import atoll

SAMPLES, BATCH, EPOCHS = 29, 7, 3
EVERYTHING = {"sparsity": 0.0, "staleness": 0, "values": "float32", "digest_every": 2}


class Smooth(nn.Module):
    """Its first and last layers share a weight, one layer is frozen; no entry of a gradient is ever exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.middle = nn.Linear(33, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.middle(torch.tanh(self.frozen(torch.tanh(self.first(x))))))
        return nn.functional.linear(y, self.first.weight.t())


class Tied(nn.Module):
    """A weight that two modules hold, as the embedding and the head of a language model do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Bare(nn.Module):
    """Its embedding's weight is used, the embedding itself never called: no forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 20)
        self.last = nn.Linear(20, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(x @ self.table.weight))


class Images(nn.Module):
    """A convolution whose weights lie in memory with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Sequential(nn.Conv2d(2, 8, 2), nn.Tanh(), nn.Conv2d(8, 6, 2))
        self.convolutions = convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x[:, :, None, None].expand(-1, -1, 3, 3).reshape(-1, 2, 9, 3)[:, :, :3].contiguous()
        return self.convolutions(images).flatten(1)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    biases = [one for name, one in named.items() if name.endswith("bias") and one.requires_grad]
    weights = [one for name, one in named.items() if not name.endswith("bias") and one.requires_grad]
    groups = [{"params": weights, "weight_decay": 0.2, "lr": 0.03}, {"params": biases, "betas": (0.8, 0.99)}]
    return torch.optim.AdamW(groups, lr=0.01)


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    on_parameters: bool = True  # else the optimizer is made of the model
    accumulate: int = 1
    clip_norm: float = 0.0
    scheduled: bool = False
    own_backward: bool = False
    exchanges: tuple[Literal["updates", "gradients"], ...] = ("updates", "gradients")


BY_GRADIENTS: Final = ("gradients",)  # the mean of the ranks' own updates is another than that of the whole batch
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
CASES = [
    Case("sgd with momentum", Smooth, SGD, scheduled=True),
    Case("sgd without", Tied, partial(torch.optim.SGD, lr=0.1, weight_decay=0.01), own_backward=True),
    Case("nesterov, tied", Tied, partial(torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.05)),
    Case("adamw, two groups", Smooth, two_groups, on_parameters=False, scheduled=True, exchanges=BY_GRADIENTS),
    Case("adam", Tied, partial(torch.optim.Adam, lr=0.01, weight_decay=0.1), exchanges=BY_GRADIENTS),
    Case("accumulation", Smooth, SGD, accumulate=2),
    Case("accumulation, own backward", Smooth, SGD, accumulate=2, own_backward=True),
    Case("clipping", Smooth, SGD, clip_norm=0.05, exchanges=BY_GRADIENTS),
    Case("clipping over two passes", Bare, SGD, accumulate=2, clip_norm=0.05, exchanges=BY_GRADIENTS),
    Case("channels last", Images, SGD),
    Case("a weight without a forward pass of its own", Bare, SGD),
]


generator = torch.Generator().manual_seed(3)
inputs, targets = (torch.randn(SAMPLES, 6, generator=generator) for _ in range(2))

Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def train(case: Case, strategy: Literal["dense"] | atoll.StaleSparse) -> Trained:
    """Losses by step and of an evaluation after each epoch, weights, and moments where all ranks' are the same."""
    with opened(strategy) as run:
        model = case.model()
        begun = {name: one.detach().clone() for name, one in model.named_parameters()}
        chosen = [one for one in model.parameters() if one.requires_grad] if case.on_parameters else model
        optimizer = case.optimizer(chosen)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5) if case.scheduled else None
        data = torch.utils.data.TensorDataset(inputs, targets)
        model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)
        losses = []
        for _ in run.epochs(EPOCHS):
            for x, y in loader:
                last = (run.step + 1) % case.accumulate == 0
                loss = nn.functional.mse_loss(model(x), y) / case.accumulate
                losses.append(loss.item())
                if case.own_backward:
                    loss.backward()
                else:
                    run.backward(loss)
                if last and case.clip_norm and strategy == "dense":
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
                elif last and case.clip_norm:
                    assert run.clip_grad_norm(case.clip_norm) is None
                if last:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=not case.own_backward)
            if scheduler is not None:
                scheduler.step()
            model.eval()
            with torch.no_grad():
                losses.append(nn.functional.mse_loss(model(inputs), targets).item())
            model.train()
        trained = {name: one.detach().clone() for name, one in model.named_parameters()}
        if isinstance(strategy, atoll.StaleSparse):
            check_all_ranks_have(run, trained)
            for name, master in masters(run, model).items():
                assert torch.equal(master, trained[name]), name
        for name, one in model.named_parameters():
            assert torch.equal(trained[name], begun[name]) != one.requires_grad, name
        moments = {
            f"{name} of parameter {index}": value.detach().clone()
            for index, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
            if value is not None  # torch's word for no momentum
        }
    return losses, trained, moments


def compare(case: Case) -> None:
    dense_losses, dense, dense_moments = train(case, "dense")
    for exchange in case.exchanges:
        losses, sparse, moments = train(case, atoll.StaleSparse(exchange=exchange, **EVERYTHING))
        torch.testing.assert_close(losses, dense_losses, rtol=1e-4, atol=1e-6, msg=note(case, exchange))
        torch.testing.assert_close(sparse, dense, rtol=1e-3, atol=2e-6, msg=note(case, exchange))
        if exchange == "gradients":
            torch.testing.assert_close(moments, dense_moments, rtol=1e-3, atol=1e-6, msg=note(case, exchange))


def note(case: Case, exchange: str) -> Callable[[str], str]:
    return lambda message: f"{case.name}, exchange of {exchange}: {message}"


for one in CASES:
    compare(one)
print(f"{len(CASES)} cases agree", file=sys.stderr)
