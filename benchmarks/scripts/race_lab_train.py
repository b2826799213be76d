"""One island of benchmarks/race_lab.py: `race_lab_train.py '{"method": ...}'`, which rank stands in the environment.

Says "ready", reads what the race exchanges as a line of JSON, trains, and says the seconds of a step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from lab.lifeline import end_with_parent
from racing.clock import Exchange
from racing.inner import CLIP
from racing.task import Batches, Bytes, Task, loss_of, shards
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

LAB: Final = Bytes(width=128, layers=4, context=64, batch=2)
WARM_UP: Final = 2
BUCKET_MB: Final = 0.25
POWERSGD_FROM: Final = 2  # its own lower limit
FORWARD_SHARE: Final = 1 / 3


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    steps: int
    step_s: float
    deadline_s: float
    parent: int


class Pace:
    """Makes a step as long as it should be: the whole forward pass, and each block's part of the backward pass."""

    def __init__(self, model: nn.Module, step_s: float) -> None:
        self._step_s, self._from_s, self._done = step_s, 0.0, 0
        self._blocks = list(model.blocks)  # type: ignore[arg-type]
        for block in self._blocks:
            block.register_full_backward_hook(self._block_back)

    def forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The clock begins with the first layer, after whatever the step has to wait for."""
        loss = run()
        self._done = 0
        time.sleep(max(0.0, self._from_s + FORWARD_SHARE * self._step_s - time.perf_counter()))
        return loss

    def begin(self, *_: object) -> None:
        self._from_s = time.perf_counter()

    def _block_back(self, *_: object) -> None:
        self._done += 1
        share = FORWARD_SHARE + (1 - FORWARD_SHARE) * self._done / len(self._blocks)
        time.sleep(max(0.0, self._from_s + share * self._step_s - time.perf_counter()))


class Island:
    def __init__(self, asked: Asked) -> None:
        self.rank, self._asked = int(os.environ["RANK"]), asked
        self.task = Task(LAB, 0)
        self.model = self.task.own_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self._batches = Batches(shards(LAB, "P1", int(os.environ["WORLD_SIZE"]), 0)[self.rank], LAB, 0, self.rank)
        self.pace = Pace(self.model, asked.step_s)
        self.model.token.register_forward_pre_hook(self.pace.begin)  # type: ignore[union-attr]

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        inputs, targets = self._batches.at(step)
        return self.pace.forward(lambda: loss_of(model(inputs), targets))


def ready() -> list[Exchange]:
    print("ready", flush=True)
    return [Exchange(**one) for one in json.loads(sys.stdin.readline())]


def per_step(done_s: Sequence[float]) -> float:
    return (done_s[-1] - done_s[WARM_UP - 1]) / (len(done_s) - WARM_UP)


def atolls(asked: Asked) -> float:
    import atoll
    from atoll.strategies import registry

    run = atoll.init(seed=1, strategy=registry.find(asked.method).settings())
    island = Island(asked)
    rows = LAB.batch * run.world_size
    dataset = torch.utils.data.TensorDataset(torch.arange(rows * asked.steps))
    model, optimizer, loader = run.prepare(island.model, island.optimizer, dataset, batch_size=rows)
    ready()
    done_s = []
    for _ in run.epochs(1):
        for step, _ in enumerate(loader):
            run.backward(island.loss(model, step))
            run.clip_grad_norm(CLIP)
            optimizer.step()
            optimizer.zero_grad()
            done_s.append(time.perf_counter())
    return per_step(done_s)


def torchs(asked: Asked) -> float:
    dist.init_process_group("gloo")
    island = Island(asked)
    model: Any = DistributedDataParallel(island.model, bucket_cap_mb=400 if "power" in asked.method else BUCKET_MB)
    if asked.method == "ddp-bf16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # gloo has no bfloat16
    if asked.method == "powersgd-2":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=POWERSGD_FROM)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    ready()
    return trained(island, model, asked.steps, lambda step: None)


def replayed(asked: Asked) -> float:
    """What the race says is exchanged, as collectives beside steps that know nothing of it."""
    dist.init_process_group("gloo")
    island, islands = Island(asked), int(os.environ["WORLD_SIZE"])
    exchanges = ready()
    due: dict[int, list[Any]] = {}

    def begin(one: Exchange) -> Any:
        if one.hops > 1:  # a ring
            payload = torch.zeros(round(one.up_bytes / (2 * (islands - 1) / islands)), dtype=torch.uint8)
            return dist.all_reduce(payload, async_op=True)
        payload = torch.zeros(round(one.up_bytes / (islands - 1)), dtype=torch.uint8)
        return dist.all_gather([torch.empty_like(payload) for _ in range(islands)], payload, async_op=True)

    def between(step: int) -> None:
        for one in exchanges:
            if one.after == step:
                due.setdefault(one.due, []).append(begin(one))
        for work in due.pop(step + 1, ()):
            work.wait()

    return trained(island, island.model, asked.steps, between)


def trained(island: Island, model: nn.Module, steps: int, between: Callable[[int], None]) -> float:
    done_s = []
    for step in range(steps):
        island.loss(model, step).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(island.model.parameters(), CLIP)
        island.optimizer.step()
        island.optimizer.zero_grad()
        between(step)
        done_s.append(time.perf_counter())
    dist.destroy_process_group()
    return per_step(done_s)


def main() -> None:
    asked = Asked(**json.loads(sys.argv[1]))
    end_with_parent(asked.parent)
    torch.set_num_threads(1)
    match asked.method:
        case "local-steps" | "stale-sparse":
            print(atolls(asked))
        case "ddp" | "ddp-bf16" | "powersgd-2":
            print(torchs(asked))
        case _:
            print(replayed(asked))


if __name__ == "__main__":
    main()
