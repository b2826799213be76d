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
from atoll.strategies.groups.claims import Claims
from atoll.strategies.groups.mailbox import ROUND_ENDS, START_OF_RUN
from atoll.strategies.groups.signals import Signals
from atoll.strategies.groups.worker import RoundEngine

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=192)
parser.add_argument("--round-batches", type=int, default=4)
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--slow-rank", type=int, default=-1, help="its updates take three times --update-s")
parser.add_argument("--update-s", type=float, default=0.0)
parser.add_argument("--die", default="", help="RANK:ROUND:PLACE, by SIGKILL; die_where_asked has the places")
parser.add_argument("--die-after", type=int, default=2, help="messages, with during")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--tell-groups", action="store_true", help="OUT/run-N-rank-R.groups: round, group, members")
parser.add_argument("--flaw", default="")
options = parser.parse_args()

run = atoll.init(seed=7, strategy="groups")
RANK = int(os.environ.get("ATOLL_RANK", run.rank))  # in the run, for good
NAME = f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{RANK}"
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
    time.sleep(options.update_s * (3 if options.slow_rank == RANK else 1))
    return nn.functional.mse_loss(outputs, targets, reduction="none" if options.flaw == "losses" else "mean")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_where_asked() -> None:
    """In the asked-for round: in a forward or backward pass, around the averages of its groups or of its end, while
    waiting for a group, or between it and the round before."""
    if not options.die:
        return
    rank, round_, when = options.die.split(":")
    if int(rank) != RANK:
        return
    real_attempt, real_ready, real_step, real_begin = (
        Averaging._attempt, Signals.ready, RoundEngine._update, Claims.begin,
    )  # fmt: skip
    where, _, at_end = when.partition("-")
    here = {"round": -1}

    def attempt(self: Averaging, group: Grouped, *rest: object) -> object:
        ends = ROUND_ENDS < group.number < START_OF_RUN
        dies = group.round == int(round_) and group.number < START_OF_RUN and ends == bool(at_end)
        if dies and where == "before":
            die()
        if dies and where == "during":
            send, sent = self._send, []

            def one_message(*message: object) -> None:
                send(*message)  # type: ignore[arg-type]
                sent.append(message)
                if len(sent) == options.die_after:
                    time.sleep(1.0)  # the wire's thread sends it
                    die()

            self._send = one_message
        done = real_attempt(self, group, *rest)  # type: ignore[arg-type]
        if dies and where == "after":
            time.sleep(1.0)
            die()
        return done

    def ready(self: Signals) -> object:
        if where == "waiting" and self._round == int(round_):
            self._scheduler.tell(self._message(signal=self.newest + 1))
            time.sleep(0.5)
            die()
        return real_ready(self)

    def update(self: RoundEngine, indices: list[int]) -> float:
        here["round"] = self._round
        return real_step(self, indices)

    def begin(self: Claims, number: int, batches: int) -> None:
        if where == "between" and number == int(round_):
            die()
        real_begin(self, number, batches)

    def backward(*_: object) -> None:
        if where == "backward" and here["round"] == int(round_):
            die()

    def forward(*_: object) -> None:
        if where == "forward" and here["round"] == int(round_):
            die()

    model[0].register_forward_hook(forward)
    model[-1].register_full_backward_hook(backward)
    Averaging._attempt, Signals.ready = attempt, ready  # type: ignore[method-assign, assignment]
    RoundEngine._update, Claims.begin = update, begin  # type: ignore[method-assign]


def tell_updates() -> None:
    """OUT/run-N-rank-R.updates: of each update its view, round and samples."""
    real = RoundEngine._update

    def update(self: RoundEngine, indices: list[int]) -> float:
        loss = real(self, indices)
        with (options.out / f"{NAME}.updates").open("a") as file:
            file.write(json.dumps({"view": run._session.view, "round": self._round, "samples": indices}) + "\n")
        return loss

    RoundEngine._update = update  # type: ignore[method-assign]


def tell_groups() -> None:
    real = Averaging.average

    def average(self: Averaging, group: Grouped, *rest: object) -> object:
        averaged = real(self, group, *rest)  # type: ignore[arg-type]
        if averaged is not None and group.number < ROUND_ENDS:
            with (options.out / f"{NAME}.groups").open("a") as file:
                file.write(f"{group.round} {group.number} {list(averaged.members)}\n")
        return averaged

    Averaging.average = average  # type: ignore[method-assign, assignment]


torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))
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
tell_updates()
for _ in run.epochs(options.epochs):
    for each in loader:
        trained.clear()
        number = run.step
        loss = train_round(each)
        if run._training is not None and run._training.succession.member.aborted is not None:
            continue  # nothing of it counts
        run.report(loss=loss.item())
        with (options.out / f"{NAME}.jsonl").open("a") as file:
            file.write(json.dumps({"round": number, "samples": trained, "loss": loss.item()}) + "\n")
torch.save({"model": model.state_dict(), "optimizer": made[0].state_dict()}, options.out / f"{NAME}.end")
