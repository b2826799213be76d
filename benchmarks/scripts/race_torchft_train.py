"""Trains one island of the race under torchft's DiLoCo; of race_torchft.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from racing.inner import CLIP, learning_rate
from racing.task import SIZES, Batches, Task, loss_of, shards
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

LOOPBACK = "127.0.0.1"
ISLANDS = 4


def train(told: Path, island: int, seed: int, lighthouse: str, options: Mapping[str, Any]) -> None:
    """Writes the held-out loss of what all share after the last outer step to `told`."""
    torch.set_num_threads(1)
    steps = options["steps"]
    task = Task(SIZES[options["size"]], seed)
    model = task.own_model()
    batches = Batches(shards(task.size, "P1", ISLANDS, seed)[island], task.size, seed, island)
    inner = torch.optim.AdamW(model.parameters(), lr=options["rate"], betas=(0.9, 0.95), weight_decay=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=options["outer"], momentum=options["momentum"], nesterov=True)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=ISLANDS,
        use_async_quorum=False,
        init_sync=False,
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=120),
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"island{island}",
        hostname=LOOPBACK,
    )
    try:
        with DiLoCo(manager, [model], inner, outer, sync_every=options["every"]):
            for step in range(steps):
                for group in inner.param_groups:
                    group["lr"] = learning_rate(options["rate"], step, steps)
                inputs, targets = batches.at(step)
                inner.zero_grad()
                loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                inner.step()
        assert manager.current_step() == steps // options["every"]  # every outer step was committed by all
        theta = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
        told.write_text(json.dumps(Task(task.size, 0).held_out(theta)))
    finally:
        manager.shutdown()
