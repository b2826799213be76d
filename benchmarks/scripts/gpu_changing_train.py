"""Trains a GPT while workers are lost and join, for the stage of scripts/gpu-check that does this to them.

    gpu_changing_train.py OUT

Adds a line to OUT/steps-RANK.jsonl after each step. Training ends with the epoch whose number is in OUT/last-epoch;
then each rank writes its weights, OUT/rank-RANK.pt."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    from gpu_check.changing_workers import EPOCH_STEPS, EPOCHS, SAMPLE_S, SHAPES
    from gpu_check.shared_device import Plan, trained
    from gpu_check.training_steps import Batch

    import atoll

    out, rank = Path(sys.argv[1]), os.environ["ATOLL_RANK"]
    torch.set_num_threads(1)
    run = atoll.init(seed=1)
    plan = Plan(SHAPES[run.device.type], EPOCH_STEPS)
    model = plan.model()
    optimizer: Any = plan.optimizer(model)
    model, optimizer, loader = run.prepare(model, optimizer, plan.loader())

    def batches() -> Iterator[Batch]:
        with (out / f"steps-{rank}.jsonl").open("a", encoding="utf-8") as lines:
            for epoch in run.epochs(EPOCHS):
                for batch in loader:
                    time.sleep(SAMPLE_S * len(batch[0]))  # pretended work, so that more workers are sooner
                    yield batch
                    line = {"at_s": time.monotonic(), "epoch": epoch, "view": int(os.environ.get("ATOLL_VIEW", "1"))}
                    lines.write(json.dumps(line | {"device": str(run.device), "workers": run.world_size}) + "\n")
                    lines.flush()
                last = out / "last-epoch"
                if last.exists() and epoch >= int(last.read_text()):
                    return

    trained(model, optimizer, batches(), run.backward)
    run.synchronize()
    torch.save({key: one.cpu() for key, one in model.state_dict().items()}, out / f"rank-{rank}.pt")


if __name__ == "__main__":
    main()
