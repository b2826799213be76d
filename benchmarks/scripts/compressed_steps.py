"""One worker of benchmarks/compressed.py: trains a paced model by strategy `compressed`, its groups as it is told.

    python compressed_steps.py '{"model": "resnet", "settings": {"algorithm": "dgc"}, "seconds": 0.12, "parent": 1}'

Which worker it is stands in RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Lines on stdin: {"groups": [[tensors, way]],
"steps": count, "links": whether they are measured anew}, on all workers the same. For each a line on stdout: seconds of
each of those steps, and what the worker measured of tensors, links and compression: `told`. Ends with its stdin.

Passes wait as long as a device would compute (paced_models.py); what is compressed, sent and updated is real.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lab.lifeline import end_with_parent
from paced_models import PacedModel

import atoll
from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.agent.runtime.strategy_interface.capabilities import Pass, WorkerContext
from atoll.strategies import registry
from atoll.strategies.compressed import worker
from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.declaration import Declared, PlanParameters

SAMPLES = 1 << 16


class Told(StrategyChannel):
    """Keeps the newest message."""

    newest: dict[str, Any] | None = None

    def tell(self, message: Declared) -> None:
        Told.newest = dict(message.said())


class ToldGroups(worker.CompressedReducer):
    """Its plans come from stdin."""

    planned = CompressedPlan()
    links = False

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(replace(context, scheduler=Told(None, registry.of(context.settings))))

    def regroup(self, params: PlanParameters) -> bool:
        return super().regroup(self.planned)

    def begin(self, opened: Pass) -> None:
        if ToldGroups.links:
            self._measuring.measure_links()
            ToldGroups.links = False
        super().begin(opened)


def phases() -> Iterator[int]:
    """Steps of each; the groups hold from its first."""
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["groups"] is not None:
            ways = sorted({way for _, way in asked["groups"]})
            groups = [[count, ways.index(way)] for count, way in asked["groups"]]
            ToldGroups.planned = CompressedPlan(ways=ways, groups=groups)
        ToldGroups.links = asked["links"]
        yield asked["steps"]


def main() -> None:
    asked = json.loads(sys.argv[1])
    end_with_parent(asked["parent"])
    torch.set_num_threads(1)
    # This thread and those that it starts: what else the machine does is not measured.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    worker.CompressedReducer = ToldGroups  # type: ignore[misc]
    run = atoll.init(seed=1, strategy=Compressed(**asked["settings"]))
    paced = PacedModel(asked["model"], asked["seconds"], run.rank)
    dataset = torch.utils.data.TensorDataset(torch.zeros(SAMPLES, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(paced.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = run.prepare(paced, optimizer, dataset, batch_size=run.world_size)
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))  # no device waits for what exchanges beside it
    print(json.dumps({"ready": True}), flush=True)
    waiting = phases()
    left, taken = 0, list[float]()
    begun_s = 0.0
    for _ in run.epochs(1_000_000):
        for (x,) in loader:
            if taken and left == 0:
                print(json.dumps({"step_s": taken, "told": Told.newest}), flush=True)
                taken = []
            if left == 0:
                if (steps := next(waiting, None)) is None:
                    return
                left, begun_s = steps, time.monotonic()
            run.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            now_s = time.monotonic()
            taken.append(now_s - begun_s)
            begun_s, left = now_s, left - 1


if __name__ == "__main__":
    main()
