"""Trains a GPT by one strategy after the other, for the stage of scripts/gpu-check in which ranks share a device.

    gpu_shared_train.py OUT PORT,PORT,...

Writes OUT/WAY-RANK.pt, the state that this rank ended with, and adds a line to OUT/rank-RANK.jsonl."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    from cases import STRATEGIES
    from gpu_check.shared_device import SHAPES, STEPS, WAYS, Plan, trained

    import atoll
    from atoll.strategies import registry

    out, ports = Path(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    for way, port in zip(WAYS, ports, strict=True):
        name, settings = STRATEGIES[way]
        os.environ["MASTER_PORT"] = port
        run = atoll.init(seed=1, strategy=registry.find(name).settings(**settings))
        rank, plan = run.rank, Plan(SHAPES[run.device.type], STEPS)
        model = plan.model()
        optimizer: Any = plan.optimizer(model)
        model, optimizer, loader = run.prepare(model, optimizer, plan.loader())
        trained(model, optimizer, (batch for _ in run.epochs(1) for batch in loader), run.backward)
        run.synchronize()
        torch.save(
            {key: one.cpu() for key, one in model.state_dict().items()}, out / f"{way.replace('/', '-')}-{rank}.pt"
        )
        sent_bytes = run.statistics().get("sent_bytes", float("nan"))
        with (out / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"way": way, "sent_bytes": sent_bytes, "device": str(run.device)}) + "\n")
        run.close()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
