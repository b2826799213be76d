"""A small model in stages under strategy groups.

OUT/run-N-rank-R.jsonl has a line for each round: its number, the view, the samples that this rank fetched in it, the
loss; for one that broke, too.
OUT/run-N-rank-R.end (torch.save) has the weights of its stage; OUT/run-N-rank-R.peak the most of them that it had."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import atoll
from atoll.agent.runtime.pipeline.wire import StageLinks, StagePurpose

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=96)
parser.add_argument("--round-batches", type=int, default=4)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--model", default="meta", choices=["meta", "list", "real"])
parser.add_argument("--split-at", nargs="*")
parser.add_argument("--clip", type=float)
parser.add_argument("--bfloat16", action="store_true")
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--augment", action="store_true", help="every other sample, at random, is of the first word alone")
parser.add_argument("--die", default="", help="RANK:ROUND:SAMPLES, by SIGKILL once it has fetched so many of the round")
parser.add_argument("--die-ahead", default="", help="RANK:ROUND, once that is over for RANK and the next pipeline; the "
                    "last one has made its averages by then, and its end does not come")  # fmt: skip
parser.add_argument("--flaw", default="")
options = parser.parse_args()

run = atoll.init(seed=7, strategy="groups")
FIRST_RANK = run.rank  # later views have others
NAME = f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{FIRST_RANK}"
fetched: list[int] = []


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if options.recompute and inputs.requires_grad:
            return inputs + checkpoint(self._residual, inputs, use_reentrant=False)
        return inputs + self._residual(inputs)

    def _residual(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(inputs))))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> object:
        return inputs, self.linear(inputs)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Words in, the next word's class out; rows of later samples are shorter."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.words = torch.randint(0, 11, (options.samples, 6), generator=generator)

    def __len__(self) -> int:
        return options.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        fetched.append(index)
        rank, round_, samples = (int(one) for one in options.die.split(":")) if options.die else (-1, 0, 0)
        if (FIRST_RANK, run.step) == (rank, round_) and len(fetched) >= samples:
            os.kill(os.getpid(), signal.SIGKILL)
        words = self.words[index]
        if options.augment and torch.rand(()) < 0.5:
            words = torch.zeros_like(words)
        return words, (words.sum() % 4)


class Mean(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean(dim=1)


def makers() -> list[object]:
    made: list[object] = [lambda: nn.Embedding(11, 8), *[lambda: Block(8)] * 3, Mean, lambda: nn.Linear(8, 4)]
    if options.flaw == "pair":
        made[2] = Pair
    if options.flaw == "own":
        made[2] = Own
    if options.flaw == "short":
        made = made[:1]
    return made


def model() -> object:
    if options.model == "list":
        return makers()
    torch.manual_seed(7)
    with torch.device("meta") if options.model == "meta" else contextlib.nullcontext():
        whole = nn.Sequential(*(make() for make in makers()))  # type: ignore[operator]
    if options.flaw == "tied":
        whole[3].up.weight = whole[1].up.weight  # type: ignore[union-attr]
    return whole


def make(parameters: object) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]
    listed = list(parameters)  # type: ignore[call-overload]
    groups = [
        {"params": [one for one in listed if one.dim() > 1]},
        {"params": [one for one in listed if one.dim() <= 1], "weight_decay": 0.0},
    ]
    if options.flaw == "groups" and run.rank == 0:
        groups = groups[:1]
    return torch.optim.AdamW(groups, lr=0.01)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none" if options.flaw == "losses" else "mean")


train_round, loader = run.prepare_pipeline(
    model(),  # type: ignore[arg-type]
    make,
    loss_of,
    Data(),
    options.batch,
    options.micro_batches,
    split_at=options.split_at,
    clip_norm=options.clip,
    round_batches=options.round_batches,
)


def die_ahead() -> None:
    rank, round_ = (int(one) for one in options.die_ahead.split(":"))
    ends = StageLinks.last_stages

    def last_stages(links: StageLinks, number: float) -> float:
        place = links.place
        if run.step == round_ and place.pipeline == place.pipelines - 1 and "ATOLL_VIEW" not in os.environ:
            links._take_number(StagePurpose.LOSS, links.batch, place.mates[0], micro=4000)  # until a peer is lost
        return ends(links, number)

    StageLinks.last_stages = last_stages  # type: ignore[method-assign]
    if rank == FIRST_RANK:
        next_ones = [options.out / f"{NAME[:-1]}{one}.jsonl" for one in range(rank + 1, rank + 3)]

        def wait_and_die() -> None:
            while not all(path.exists() and f'"round": {round_},' in path.read_text() for path in next_ones):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait_and_die, daemon=True).start()


if options.die_ahead:
    die_ahead()
low = torch.autocast("cpu", dtype=torch.bfloat16) if options.bfloat16 else contextlib.nullcontext()
for _ in run.epochs(options.epochs):
    for each in loader:
        fetched.clear()
        number, view = run.step, int(os.environ.get("ATOLL_VIEW", "1"))
        with low:
            loss = train_round(each)
        run.report(loss=loss.item())
        with (options.out / f"{NAME}.jsonl").open("a") as file:
            line = {"round": number, "view": view, "samples": fetched, "loss": loss.item()}
            file.write(json.dumps(line) + "\n")
stage = run._training._model.state_dict()  # type: ignore[union-attr]
torch.save(stage, options.out / f"{NAME}.end")
