"""Trains tests/runtime/moving_model.py. What checkpoints read in the background they read after the next forward pass
has written it. What a run resumed with is in OUT/resumed-RUN-RANK.pt, what it ended with in OUT/ended-RUN-RANK.pt."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from generations import await_generation, keep_every_step
from stopping import await_stop

import atoll
from atoll.agent.runtime.checkpoints.memory.shards.live_state import Sources
from atoll.agent.runtime.model import kept_tensors

sys.path.insert(0, str(Path(__file__).parents[1]))
from moving_model import BATCH, Average, made, samples

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--await-stop-at", type=int, default=-1)
parser.add_argument("--kill-step", type=int, default=-1, help="rank 1 ends itself after its forward pass")
parser.add_argument("--watched", action="store_true", help="nothing is copied that was not seen to move")
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()

forwarded, copies = threading.Event(), Sources.copies


def after_forward(self: Sources, *args: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        forwarded.wait(20)
    yield from copies(self, *args)


Sources.copies = after_forward  # type: ignore[method-assign]
if options.watched:
    kept_tensors.MIN_COPY_BUDGET_BYTES, kept_tensors.MAX_COPIED_RATIO = 0, 0.0  # type: ignore[misc]
keep_every_step()


def keep(what: str) -> None:
    name = f"{what}-{os.environ.get('ATOLL_RUN', '1')}-{run.rank}.pt"
    torch.save((run.step, dict(given.state_dict()), average.state_dict()), options.out / name)


run = atoll.init(seed=7)
model, optimizer = made()
average = Average()
run.track("average", average)
given: Any = model
if options.compile:
    type(model).forward = torch.compiler.disable(type(model).forward)  # type: ignore[method-assign]
    given = torch.compile(model, backend="eager")
data = torch.utils.data.TensorDataset(samples())
given, optimizer, loader = run.prepare(given, optimizer, data, batch_size=BATCH, shuffle=False)
keep("resumed")
for _ in run.epochs(options.epochs):
    for (x,) in loader:
        average.tick()
        loss = given(x)
        forwarded.set()
        await_generation(run)
        if run.rank == 1 and loader.current.step == options.kill_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if loader.current.step == options.await_stop_at:
            await_stop(run)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        forwarded.clear()
    forwarded.set()
keep("ended")
