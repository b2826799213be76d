"""Trains with two optimizers and writes down everything: OUT/run-N-rank-R.jsonl, one line per batch, .begun, one line
as each begins, and .end.

gan: two models. The discriminator steps with every batch, the generator with every second one and behind it; a
GradScaler, and a schedule for each. pair: one model, whose matrices are Muon's and the rest AdamW's; every second batch
is an update, clipped."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generations import await_generation, keep_every_step
from stopping import await_stop
from torch import nn

import atoll

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["gan", "pair", "unprepared", "apart"])
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--sgd", action="store_true", help="optimizers that are linear in the gradient, for exact sums")
parser.add_argument("--settings", type=json.loads, help="of atoll.StaleSparse, where no agent tells them")
parser.add_argument("--die-at", type=int, default=-1, help="rank 1 is killed in this step, behind the first update")
parser.add_argument("--await-stop-at", type=int, default=-1, help="rank 1 waits in this step for a stop")
parser.add_argument("--hold-at", type=int, default=-1, help="all wait in this step, until somebody kills them")
parser.add_argument("--often", action="store_true", help="a generation in memory every step")
options = parser.parse_args()


def refused(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Both ranks refuse by themselves: one that leaves before the other has is a lost peer to it."""
    sys.__excepthook__(kind, error, trace)
    (options.out / f"{options.kind}-refused-{os.environ['RANK']}").touch()
    other, until_s = options.out / f"{options.kind}-refused-{1 - int(os.environ['RANK'])}", time.monotonic() + 30
    while not other.exists() and time.monotonic() < until_s:
        time.sleep(0.01)


if options.kind in {"unprepared", "apart"}:
    sys.excepthook = refused

SAMPLES, BATCH = 100, 12  # 8 whole batches and one of 4 in each epoch
run = atoll.init(seed=7, strategy=atoll.StaleSparse(**options.settings) if options.settings is not None else "dense")
reduced: list[int] = []  # entries of all-reduces of gradients
all_reduce = dist.all_reduce


def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.dtype == torch.float32:
        reduced.append(tensor.numel())
    return all_reduce(tensor, *args, **kwargs)


dist.all_reduce = counting
number = os.environ.get("ATOLL_RUN", "0")


def data() -> torch.utils.data.TensorDataset:
    """Noise and a target for each sample, so that nothing depends on how batches are split."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(SAMPLES, 8, generator=generator)
    return torch.utils.data.TensorDataset(noise, noise.cumsum(dim=1).tanh())


def network(out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, out))


def optimizer_of(kind: type[torch.optim.Optimizer], parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr / 10, momentum=0.9) if options.sgd else kind(parameters, lr=lr)  # type: ignore[call-arg]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def digest(tensors: list[torch.Tensor]) -> str:
    return blake2b(b"".join(one.detach().contiguous().numpy().tobytes() for one in tensors)).hexdigest()[:16]


def moments(optimizers: Any) -> list[torch.Tensor]:
    kept = [value for one in optimizers for state in one.state_dict()["state"].values() for value in state.values()]
    return [value for value in kept if isinstance(value, torch.Tensor)]


def clip(parameters: Iterable[torch.Tensor] | None) -> None:
    if not options.sgd:  # by stale-sparse each rank clips its own gradient
        run.clip_grad_norm(0.5, parameters)


def die(step: int) -> None:
    if run.rank == 1 and step == options.die_at:
        os.kill(os.getpid(), signal.SIGKILL)


class Gan:
    def __init__(self) -> None:
        self.models = network(8), network(1)
        generator, discriminator = self.models
        self.optimizers = (
            optimizer_of(torch.optim.Adam, generator.parameters(), 0.01),
            optimizer_of(torch.optim.RMSprop, discriminator.parameters(), 0.01),
        )
        self.schedulers = [schedule(one) for one in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        run.track("scaler", self.scaler)

    def train(self, noise: torch.Tensor, real: torch.Tensor, index: int) -> list[torch.Tensor]:
        (generator, discriminator), (optimizer_g, optimizer_d) = self.models, self.optimizers
        losses = [discriminator(generator(noise).detach()).mean() - discriminator(real).mean()]
        optimizer_d.zero_grad()
        run.backward(self.scaler.scale(losses[0]))
        self.scaler.unscale_(optimizer_d)
        clip(discriminator.parameters())
        self.scaler.step(optimizer_d)
        die(run.step)
        if index % 2 == 0:
            losses.append(-discriminator(generator(noise)).mean())
            optimizer_g.zero_grad()
            run.backward(self.scaler.scale(losses[1]))  # leaves gradients in the discriminator, too
            self.scaler.step(optimizer_g)
        self.scaler.update()
        return losses


class Pair:
    def __init__(self) -> None:
        self.models = network(8)
        named = list(self.models.named_parameters())
        matrices = [one for name, one in named if one.dim() == 2]
        self.optimizers = [
            optimizer_of(torch.optim.Muon, matrices, 0.01),
            optimizer_of(torch.optim.AdamW, [one for name, one in named if one.dim() != 2], 0.01),
        ]
        self.schedulers = tuple(schedule(one) for one in self.optimizers)

    def train(self, noise: torch.Tensor, real: torch.Tensor, index: int) -> list[torch.Tensor]:
        loss = nn.functional.mse_loss(self.models(noise), real)
        run.backward(loss / 2)
        if index % 2 or run.last_batch:
            clip(None)
            for optimizer in self.optimizers:
                optimizer.step()
                die(run.step)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        return [loss]


class Apart(Pair):
    """AdamW steps with every second batch, Muon with every one: at odd boundaries AdamW's gradients are halves."""

    def train(self, noise: torch.Tensor, real: torch.Tensor, index: int) -> list[torch.Tensor]:
        loss = nn.functional.mse_loss(self.models(noise), real)
        run.backward(loss)
        for optimizer in self.optimizers if index % 2 else self.optimizers[:1]:
            optimizer.step()
            optimizer.zero_grad()
        return [loss]


work = Gan() if options.kind == "gan" else Apart() if options.kind == "apart" else Pair()
given = work.optimizers[:1] if options.kind == "unprepared" else work.optimizers
models, optimizers, loader = run.prepare(work.models, given, data(), batch_size=BATCH, scheduler=work.schedulers)
assert (models, optimizers) == (work.models, given)
if isinstance(models, tuple):
    weights = [one for model in models for one in model.parameters()]
else:
    weights = list(models.parameters())

if options.often:
    keep_every_step()
assert run._training is not None
update: Any = getattr(run._training._current.driver, "update", None)
begun_step = run.step
name = f"run-{number}-rank-{run.rank}"
with (
    (options.out / f"{name}.jsonl").open("a", buffering=1) as log,
    (options.out / f"{name}.begun").open("a", buffering=1) as begun,
):
    for _ in run.epochs(options.epochs):
        for noise, real in loader:
            step = run.step
            line = {
                "step": step,
                "moments": digest(moments(optimizers)),
                "weights": digest(weights) if update is None else "",  # those differ until they are synchronized
                "lrs": [group["lr"] for one in optimizers for group in one.param_groups],
            }
            begun.write(json.dumps(line) + "\n")
            if options.often:
                await_generation(run)
            if step == options.hold_at:
                threading.Event().wait(120)
            if step == options.await_stop_at and run.rank == 1:
                await_stop(run)
            reduced.clear()
            losses = work.train(noise, real, step % (SAMPLES // BATCH + 1))
            if step >= begun_step:  # at an epoch's end the last batch is shown again
                log.write(
                    json.dumps(line | {"losses": [one.item().hex() for one in losses], "reduced": sum(reduced)}) + "\n"
                )
        for scheduler in work.schedulers:
            scheduler.step()
        run.report(loss=losses[0].item())
end = {
    "weights": [one.detach() for one in weights],
    "optimizers": [one.state_dict() for one in optimizers],
    "rounds": update._round if update is not None else 0,
    "scaler": work.scaler.state_dict() if isinstance(work, Gan) else {},
}
torch.save(end, options.out / f"{name}.end")
