"""A model whose forward pass writes all that does not train, and what plain PyTorch makes of it, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

STEPS, BATCH, WIDTH, DECAY = 12, 8, 20_000, 0.9  # of an epoch
State = dict[str, Any]


class Moving(nn.Module):
    """Every forward pass adds 1 to all kinds of state, and moves an average of the weights."""

    grown: torch.Tensor
    passes: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.momentum = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH).requires_grad_(False)
        self.momentum.load_state_dict(self.encoder.state_dict())
        self.stamp = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.rebound = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("passes", torch.zeros(WIDTH, dtype=torch.int64))
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("late", None)
        self.register_buffer("scratch", torch.zeros(WIDTH), persistent=False)
        self.extra = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for average, weight in zip(self.momentum.parameters(), self.encoder.parameters(), strict=True):
                average.data.mul_(DECAY).add_(weight.data, alpha=1 - DECAY)
            self.stamp += 1
            self.rebound.data = self.rebound.data + 1
            self.passes += 1
            self.scratch += 1
            self.grown = torch.cat([self.grown, self.stamp[:1]])
            self.late = torch.ones(3) if self.late is None else self.late + 1
            if not hasattr(self, "lazy"):
                self.register_buffer("lazy", torch.zeros(2))
            self.lazy += 1
        self.extra += 1
        return (self.encoder(x) - self.momentum(x)).square().mean() + self.encoder(x).square().mean()

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


class Average:
    """Kept by run.track; it moves as a step begins, and not in its update."""

    def __init__(self) -> None:
        self.ticks, self.seen = torch.zeros(WIDTH), Counter[int]()

    def tick(self) -> None:
        self.ticks += 1
        self.seen[3] += 2

    def state_dict(self) -> State:
        return {"ticks": self.ticks, "seen": self.seen}

    def load_state_dict(self, state: State) -> None:
        self.ticks, self.seen = state["ticks"], state["seen"]
        self.seen.update({})  # of a Counter


def made() -> tuple[Moving, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Moving()
    return model, torch.optim.AdamW(model.encoder.parameters(), lr=0.01)


def samples() -> torch.Tensor:
    return torch.randn(BATCH * STEPS, 8, generator=torch.Generator().manual_seed(3))


def plain_states(steps: int) -> list[State]:
    """After each step, from the start on. Epochs have the same order."""
    batches = samples().split(BATCH)
    model, optimizer = made()
    found = []
    for number in range(steps + 1):
        found.append({name: value.clone() if isinstance(value, torch.Tensor) else value
                      for name, value in model.state_dict().items()})  # fmt: skip
        if number < steps:
            model(batches[number % STEPS]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def check(state: State, tracked: State, step: int, plain: list[State]) -> None:
    """All of it is of this step."""
    assert tracked["ticks"].unique().tolist() == ([float(step)])
    assert type(tracked["seen"]) is Counter
    assert tracked["seen"] == ({3: 2 * step} if step else {})
    assert state.keys() == plain[step].keys(), step
    for name, expected in plain[step].items():
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-5, msg=f"{name} at {step}")
        else:
            assert state[name] == expected, name
