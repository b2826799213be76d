"""Each strategy alone, in this process, inside one region of torch.autocast, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import atoll

BATCH, ROUND, EPOCHS = 8, 2, 3  # a power of two: sums and means over a batch round alike
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(4 * BATCH, 6, generator=generator)
DATA = TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def plain(*, bfloat16: bool) -> list[float]:
    """Train in plain PyTorch, with a region for each forward pass. Return the loss of each epoch."""
    model = network()
    optimizer, losses = optimizer_of(model.parameters()), []
    for _ in range(EPOCHS):
        losses.append(0.0)
        for begin in range(0, len(DATA), BATCH):
            given, targets = DATA[begin : begin + BATCH]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
                loss = functional.mse_loss(model(given), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1] += loss.item() * BATCH / len(DATA)
    return losses


@pytest.fixture
def runs() -> Iterator[list[atoll.Run]]:
    opened: list[atoll.Run] = []
    yield opened
    for run in opened:
        run.close()


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("strategy", ["groups", "volunteer"])
def test_engines_make_updates_inside_the_scripts_region_as_plain_pytorch_does(
    runs: list[atoll.Run], strategy: str, *, bfloat16: bool
) -> None:
    """torch.autocast caches casts of weights until its region ends, and here it ends with training."""
    runs.append(run := atoll.init(strategy=strategy))
    train, loader = run.prepare_pipeline(
        network(), optimizer_of, functional.mse_loss, DATA, BATCH, round_batches=ROUND, shuffle=False
    )
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        for _ in run.epochs(EPOCHS):
            each_loss = [train(each).item() for each in loader]
            losses.append(sum(each_loss) / len(each_loss))
    assert losses == pytest.approx(plain(bfloat16=bfloat16), rel=1e-4)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(
    "strategy",
    ["dense", "local-steps", atoll.StaleSparse(sparsity=0.0), "compressed", "zen"],
    ids=["dense", "local-steps", "stale-sparse", "compressed", "zen"],
)
def test_updates_inside_one_region_are_those_of_plain_pytorch(
    runs: list[atoll.Run], strategy: str | atoll.StaleSparse, *, bfloat16: bool
) -> None:
    """1. A script has its whole training in one region, which plain PyTorch forbids in silence: casts of weights are
    cached until it ends. 2. With Atoll each pass has the weights of then, also where a boundary changes them, and
    after an evaluation without a gradient."""
    runs.append(run := atoll.init(strategy=strategy))
    model = network()
    optimizer = optimizer_of(model.parameters())
    _, _, loader = run.prepare(model, optimizer, DATA, BATCH, shuffle=False)
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        for _ in run.epochs(EPOCHS):
            losses.append(0.0)
            for given, targets in loader:
                loss = functional.mse_loss(model(given), targets)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses[-1] += loss.item() * BATCH / len(DATA)
            run.synchronize()
            with torch.no_grad():
                model(inputs)
    assert losses == pytest.approx(plain(bfloat16=bfloat16), rel=1e-4)
