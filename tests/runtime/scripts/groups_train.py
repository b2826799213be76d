"""A regression under strategy groups.

OUT/run-N-rank-R.jsonl has a line for each round: its number, the samples that this rank trained in it, the loss.
OUT/run-N-rank-R.end (torch.save) has weights and the optimizer's state."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import atoll
from atoll.strategies.groups.averaging import Averaging, Grouped

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=192)
parser.add_argument("--round-batches", type=int, default=4)
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--slow-rank", type=int, default=-1, help="its updates take three times --update-s")
parser.add_argument("--update-s", type=float, default=0.0)
parser.add_argument("--die", default="", help="RANK:ROUND:before|during|after an average of it, by SIGKILL")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--plain", action="store_true", help="without BatchNorm")
parser.add_argument("--tell-groups", action="store_true", help="OUT/run-N-rank-R.groups: round, group, members")
parser.add_argument("--flaw", default="")
options = parser.parse_args()

run = atoll.init(seed=7, strategy="groups")
NAME = f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{run.rank}"
trained: list[int] = []


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(options.samples, 6, generator=generator)
        self.targets = self.inputs @ torch.randn(6, 2, generator=generator)

    def __len__(self) -> int:
        return options.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        trained.append(index)
        extra = (index,) if options.flaw == "triples" else ()
        return self.inputs[index], self.targets[index], *extra  # type: ignore[return-value]


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    time.sleep(options.update_s * (3 if run.rank == options.slow_rank else 1))
    return nn.functional.mse_loss(outputs, targets, reduction="none" if options.flaw == "losses" else "mean")


def die_where_asked() -> None:
    """Around the group averages of the asked-for round; that of the round's end is group 0."""
    if not options.die:
        return
    rank, round_, when = options.die.split(":")
    real = Averaging._attempt

    def attempt(self: Averaging, group: Grouped, *rest: object) -> object:
        here = run.rank == int(rank) and group.round == int(round_) and group.number > 0
        if here and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if here and when == "during":
            send, sent = self._send, []

            def one_message(*message: object) -> None:
                send(*message)  # type: ignore[arg-type]
                sent.append(message)
                if len(sent) == 2:
                    time.sleep(0.2)  # the wire's thread sends it
                    os.kill(os.getpid(), signal.SIGKILL)

            self._send = one_message
        done = real(self, group, *rest)  # type: ignore[arg-type]
        if here and when == "after":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    Averaging._attempt = attempt  # type: ignore[method-assign, assignment]


def tell_groups() -> None:
    real = Averaging.average

    def average(self: Averaging, group: Grouped, *rest: object) -> object:
        averaged = real(self, group, *rest)  # type: ignore[arg-type]
        if averaged is not None and group.number > 0:
            with (options.out / f"{NAME}.groups").open("a") as file:
                file.write(f"{group.round} {group.number} {list(averaged.members)}\n")
        return averaged

    Averaging.average = average  # type: ignore[method-assign, assignment]


torch.manual_seed(7)
norm = [] if options.plain else [nn.BatchNorm1d(8)]
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *norm, nn.Linear(8, 2))
if options.flaw == "bfloat16":
    model.to(torch.bfloat16)
makers = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
made: list[torch.optim.Optimizer] = []


def make(parameters: object) -> torch.optim.Optimizer:
    made.append(makers[options.optimizer](parameters))
    return made[0]


if options.flaw == "prepare":
    run.prepare(model, make(model.parameters()), Data(), options.batch)
if options.tell_groups:
    tell_groups()
train_round, loader = run.prepare_pipeline(
    model, make, loss_of, Data(), options.batch, options.micro_batches, round_batches=options.round_batches
)
die_where_asked()
for _ in run.epochs(options.epochs):
    for each in loader:
        trained.clear()
        number = run.step
        loss = train_round(each)
        run.report(loss=loss.item())
        with (options.out / f"{NAME}.jsonl").open("a") as file:
            file.write(json.dumps({"round": number, "samples": trained, "loss": loss.item()}) + "\n")
torch.save({"model": model.state_dict(), "optimizer": made[0].state_dict()}, options.out / f"{NAME}.end")
