"""Submitted by benchmarks/loop_wan.py: a model of the laboratory, trained as a user would until the job is cancelled.

python follow_train.py MODEL OUT. Rank 0 writes a JSON line a step: seconds since its first, loss, total batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from wan_models import TASKS

import atoll


def main() -> None:
    name, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    run = atoll.init(seed=1)
    task = TASKS[name]
    torch.manual_seed(1)
    model = task.build(False)
    train, _ = task.split(False)
    model, optimizer, loader = run.prepare(model, task.optimizer(model), train, batch_size=task.batch * run.world_size)
    begun_s = None
    with Path(out if run.is_main else os.devnull).open("a") as log:
        for _ in run.epochs(1_000_000):
            for x, y in loader:
                loss = task.loss(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                begun_s = begun_s or time.monotonic()
                line = {"at_s": time.monotonic() - begun_s, "loss": loss.item(), "total": run.total_batch}
                log.write(json.dumps(line) + "\n")
                log.flush()


if __name__ == "__main__":
    main()
