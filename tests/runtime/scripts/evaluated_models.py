"""Evaluations in mid-training, by strategies that a script trains with: evaluated_models.py PORTS DIRECTORY NAMES.

Each strategy trains twice from equal weights, once with evaluations and checkpoints. What ranks find is compared with
plain torch, which loads the checkpoint of the same step into a fresh model and evaluates all samples alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from several_runs import bits, check_all_ranks_have, opened
from torch import nn
from torch.utils.data import TensorDataset

import atoll
from atoll.agent.runtime.checkpoints.disk import files
from atoll.agent.runtime.checkpoints.disk.folders import by_age
from atoll.errors import BadInput
from atoll.strategies.declaration import StrategySettings

DIRECTORY = Path(sys.argv[2])
SETTINGS: Any = {"staleness": 0, "digest_every": 1}  # so that no loss depends on when something arrives
STRATEGIES: dict[str, StrategySettings | str] = {
    "dense": "dense",
    "compressed": atoll.Compressed(algorithm="dgc", density=0.1, min_bytes=0),
    "stale-sparse": atoll.StaleSparse(sparsity=0.9, **SETTINGS),
    "stale-sparse by gradients": atoll.StaleSparse(exchange="gradients", sparsity=0.9, **SETTINGS),
    "local-steps": atoll.LocalSteps(density=0.05, **SETTINGS),
    "local-steps in turns": atoll.LocalSteps(density=0.2, every=3, **SETTINGS),
    "local-steps at the shared parameters": atoll.LocalSteps(density=0.2, gradients="shared_params", **SETTINGS),
}
AHEAD = {"stale-sparse", "local-steps", "local-steps in turns"}
"""Whose own weights are ahead of the shared ones."""
EVALUATED = (2, 4, 5, 8)  # steps; 4 and 8 end an epoch
generator = torch.Generator().manual_seed(3)
INPUTS = torch.randn(57, 8, generator=generator)
TARGETS = INPUTS.sum(dim=1, keepdim=True).tanh()
TRAINED, HELD_OUT = TensorDataset(INPUTS[:40], TARGETS[:40]), TensorDataset(INPUTS[40:], TARGETS[40:])


class Network(nn.Module):
    """With statistics that each rank has of its own samples, in buffers and in a frozen average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 33), nn.Linear(33, 1)
        )
        self.average = nn.Linear(8, 1).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += x.sum(dim=0)
        out: torch.Tensor = self.layers(x + 0.01 * self.seen.tanh()) + self.average(x)
        return out


def loss_sum(model: nn.Module, rows: Any) -> float:
    x, y = rows
    return nn.functional.mse_loss(model(x), y, reduction="sum").item()


def evaluated(run: atoll.Run, model: nn.Module, held_out: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """What all ranks find, and the model that they found it with; by the block, and by the loader alone."""
    assert model.training
    with run.evaluation():
        assert not model.training
        assert not torch.is_grad_enabled()
        (total,) = run.sum(sum(loss_sum(model, rows) for rows in held_out))
        shown = {name: one.clone() for name, one in model.state_dict().items()}
    assert model.training
    assert torch.is_grad_enabled()
    model.eval()
    with torch.inference_mode():
        (again,) = run.sum(sum(loss_sum(model, rows) for rows in held_out))
    model.train()
    assert again == total
    check_all_ranks_have(run, shown)
    return total, shown


def train(label: str, directory: Path, *, evaluates: bool) -> tuple[list[float], bytes]:
    """Losses, and the bits that this rank ended with."""
    losses: list[float] = []
    found: dict[int, tuple[float, dict[str, torch.Tensor]]] = {}
    ahead = False
    with opened(STRATEGIES[label], checkpoints=directory if evaluates else None, every=int(evaluates)) as run:
        run._session.checkpoint = replace(run._session.checkpoint, keep=10)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer, loader = run.prepare(model, optimizer, TRAINED, batch_size=11)
        held_out = run.evaluation_loader(HELD_OUT, batch_size=4)
        if evaluates:
            evaluated(run, model, held_out)
        for _ in run.epochs(2):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.average.weight.lerp_(x.mean(dim=0, keepdim=True), 0.3)
                losses.append(loss.item())
                if evaluates and run.step + 1 in EVALUATED:
                    found[run.step + 1] = evaluated(run, model, held_out)
                    shown = {name: found[run.step + 1][1][name] for name, _ in model.named_parameters()}
                    ahead = ahead or bits(shown) != bits(dict(model.named_parameters()))
            if evaluates:
                total, shown = evaluated(run, model, held_out)
                if run.epoch:  # behind the last batch it is the model that training ends with
                    found[run.step] = total, shown
                assert (total, bits(shown)) == (found[run.step][0], bits(found[run.step][1]))
        if evaluates:
            total, shown = evaluated(run, model, held_out)
            found[0] = total, shown
            assert bits(shown) == bits(model.state_dict())
        is_main = run.is_main
    if is_main and evaluates:
        assert ahead == (label in AHEAD), label
        for step, (total, shown) in found.items():
            compare(directory, step, total, shown)
    return losses, bits(model.state_dict())


def compare(directory: Path, step: int, total: float, shown: dict[str, torch.Tensor]) -> None:
    """With plain torch, of the checkpoint of this step; 0: of the last."""
    paths = [one for one in by_age(directory).values() if f"-{step:09d}-" in one.name or not step]
    if not paths and not step % 4:
        return  # some strategies write none there: the end of an epoch may be that of training
    tensors = files.read(paths[0]).tensors
    state = {key.removeprefix("model/"): one for key, one in tensors.items() if key.startswith("model/")}
    assert state.keys() == shown.keys()
    differing = [key for key, one in state.items() if not torch.equal(one, shown[key])]
    assert not differing, (step, differing)
    model = Network().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        expected = nn.functional.mse_loss(model(INPUTS[40:]), TARGETS[40:], reduction="sum").item()
    assert total == pytest.approx(expected, rel=1e-5), step


def one_rank_alone(label: str, calls: str) -> None:
    """Rank 0 makes a call that belongs to all ranks, and the other one trains on: both end with the reason."""
    run = atoll.init(strategy=STRATEGIES[label])
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer, loader = run.prepare(model, optimizer, TRAINED, batch_size=11)
    held_out = run.evaluation_loader(HELD_OUT, batch_size=4)
    for _ in run.epochs(2):
        for x, y in loader:
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if run.step == 2 and run.is_main:
                run.sum(1.0) if calls == "sum" else list(held_out)


def training_is_refused_meanwhile() -> None:
    """A pass, a batch and an update in an evaluation; an iterator that is kept counts as one. Then training goes on."""
    with opened("dense") as run:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        model, optimizer, loader = run.prepare(model, optimizer, TRAINED, batch_size=11)
        held_out = run.evaluation_loader(HELD_OUT, batch_size=4)
        steps = 0
        for _ in run.epochs(1):
            for x, y in loader:
                kept = iter(held_out)
                next(kept)
                with pytest.raises(BadInput, match=r"a backward pass during an evaluation\. Leave the block"):
                    run.backward(nn.functional.mse_loss(model(x), y))
                with pytest.raises(BadInput, match=r"optimizer\.step\(\) during an evaluation"):
                    optimizer.step()
                del kept
                for _ in held_out:
                    break
                run.backward(nn.functional.mse_loss(model(x), y))
                with run.evaluation():  # what waits for its update is as it was
                    pass
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        assert steps == 4


if __name__ == "__main__":
    if len(sys.argv) > 4:
        one_rank_alone(*sys.argv[3:])
        sys.exit()
    training_is_refused_meanwhile()
    for one in sys.argv[3].split(","):
        alone = train(one, DIRECTORY / f"{one}, alone", evaluates=False)
        beside = train(one, DIRECTORY / f"{one}, evaluated", evaluates=True)
        assert beside[0] == alone[0], one
        assert beside[1] == alone[1], one
        print(f"{one}: holds", flush=True)
