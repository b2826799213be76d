"""Trains a small model with whatever a script may have beside it, and writes down each batch: OUT/rank-R.jsonl. One
rank ends itself with SIGKILL at a given place of a given step. What training ended with is in OUT/rank-R.pt."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from generations import await_generation, keep_every_step
from torch import nn

import atoll
from atoll.errors import PeerLost

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--kill-rank", type=int, default=-1)
parser.add_argument("--kill-step", type=int, default=-1)
parser.add_argument("--kill-at", choices=["forward", "backward", "update", "between", "never"], default="never")
parser.add_argument("--stop-in-place", action="store_true", help="SIGSTOP in place of SIGKILL")
parser.add_argument("--await-view-at", type=int, default=-1, help="after this step's update, until it is told of one")
parser.add_argument("--accumulate", type=int, default=1, help="passes for an update")
parser.add_argument("--no-sync", action="store_true", help="all but the last of them stay local")
parser.add_argument("--two", action="store_true", help="two models with an optimizer each")
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--per-batch", action="store_true", help="the scheduler steps with every update")
parser.add_argument("--untracked", action="store_true", help="the run does not know the scheduler")
parser.add_argument("--own-backward", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--behind", type=int, default=-1, help="this rank does not hear of the kill step's gradients")
parser.add_argument("--sleep-s", type=float, default=0.0)
parser.add_argument("--workers", type=int, default=0, help="of the loader")
parser.add_argument("--often", action="store_true", help="a generation in memory every step")
options = parser.parse_args()

SAMPLES, BATCH = 100, 12


class Counting(nn.Sequential):
    """Counts its forward passes in a buffer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not options.compile:
            self.passes += 1
        return super().forward(x)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    return torch.utils.data.TensorDataset(inputs, targets, torch.arange(SAMPLES))


def dies_here(step: int, where: str) -> None:
    if me == options.kill_rank and step == options.kill_step and where == options.kill_at:
        os.kill(os.getpid(), signal.SIGSTOP if options.stop_in_place else signal.SIGKILL)


def work() -> None:
    time.sleep(options.sleep_s)
    if options.often:
        await_generation(run)


def await_view(step: int) -> None:
    if step != options.await_view_at or run._session.view > 1:
        return
    link, ends_s = run._link, time.monotonic() + 120
    while link is not None and (link.newest_view is None or link.newest_view.view <= run._session.view):
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def miss_the_end() -> None:
    """As if the last part of the kill step's sum had not come back here, though it did at the others."""
    exchange = run._prepared("the test")._current.driver
    whole = exchange.end_pass

    def end() -> Any:
        norms = whole()
        if run.step == options.kill_step:
            raise PeerLost("the test took it away")
        return norms

    exchange.end_pass = end  # type: ignore[method-assign]


def main() -> None:
    def model_of() -> nn.Module:
        return Counting(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))

    models = [model_of() for _ in range(2 if options.two else 1)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=options.scaler)
    average = torch.optim.swa_utils.AveragedModel(models[0])
    run.track("average", average)
    if options.scaler:
        run.track("scaler", scaler)
    _, _, loader = run.prepare(
        models if options.two else models[0],
        optimizers if options.two else optimizers[0],
        data(),
        batch_size=BATCH,
        scheduler=None if options.untracked else schedulers,
        num_workers=options.workers,
    )
    if me == options.behind:
        miss_the_end()
    compiled: list[Any] = [torch.compile(one, backend="aot_eager") if options.compile else one for one in models]
    for one in models:
        one[0].weight.register_hook(lambda _: dies_here(run.step, "backward"))
    with (options.out / f"rank-{me}.jsonl").open("a", buffering=1) as log:
        for epoch in run.epochs(options.epochs):
            for index, (x, y, ids) in enumerate(loader):
                work()
                part = loader.current
                assert part is not None
                step = part.step
                dies_here(step, "forward")
                updates = (index + 1) % options.accumulate == 0 or run.last_batch
                line = {
                    "step": step,
                    "epoch": epoch,
                    "index": index,
                    "ids": ids.tolist() if part.local else [],
                    "view": run._session.view,
                    "lr": optimizers[0].param_groups[0]["lr"],
                    "random": torch.rand(()).item().hex(),
                    "at_s": time.monotonic(),
                    "passes": int(models[0].passes),
                }
                log.write(json.dumps(line) + "\n")
                local = options.no_sync and not updates
                for one, optimizer in zip(compiled, optimizers, strict=True):
                    loss = nn.functional.mse_loss(one(x), y) / options.accumulate
                    with run.no_sync() if local else contextlib.nullcontext():
                        if options.own_backward:
                            scaler.scale(loss).backward()
                        else:
                            run.backward(scaler.scale(loss))
                    if updates:
                        scaler.unscale_(optimizer)
                        run.clip_grad_norm(5.0, one.parameters())
                        dies_here(step, "update")
                        scaler.step(optimizer)
                        optimizer.zero_grad()
                if updates:
                    scaler.update()
                    average.update_parameters(models[0])
                    if options.per_batch:
                        for scheduler in schedulers:
                            scheduler.step()
                run.report(loss=loss.item())
                dies_here(step, "between")
                await_view(step)
            if not options.per_batch:
                for scheduler in schedulers:
                    scheduler.step()
    states = {
        "models": [one.state_dict() for one in models],
        "optimizers": [one.state_dict() for one in optimizers],
        "schedulers": [one.state_dict() for one in schedulers],
        "average": average.state_dict(),
        "scaler": scaler.state_dict(),
        "recompiled": torch._dynamo.utils.counters["stats"]["unique_graphs"] if options.compile else 0,
    }
    torch.save(states, options.out / f"rank-{me}.pt")


if __name__ == "__main__":
    run = atoll.init(seed=7)
    me = int(os.environ.get("ATOLL_RANK", run.rank))  # for good
    if options.often:
        keep_every_step()
    main()
