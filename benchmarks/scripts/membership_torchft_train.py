"""Trains the model of membership_train.py as one of three replica groups of torchft; of membership_torchft.py.

Runs without Atoll."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

LOOPBACK = "127.0.0.1"


def train(out: Path, group: int, lighthouse: str, step_s: float, collective_s: float) -> None:
    """Trains until it is killed. Writes to OUT/GROUP, of each step as it begins: how many are committed, how many
    replicas the one before it had, and the wall clock. What torchft says is in OUT/GROUP.log."""
    with (out / f"{group}.log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(120_000, 32), torch.randn(120_000, 1))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=collective_s)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"group{group}",
        hostname=LOOPBACK,
    )
    optimizer = Optimizer(manager, sgd)
    replica = DistributedDataParallel(manager, model)
    sampler = DistributedSampler(data, group, num_replica_groups=3, group_rank=0, num_replicas=1)
    with (out / str(group)).open("a", buffering=1) as times:
        for inputs, targets in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
            times.write(f"{manager.current_step()} {manager.num_participants()} {time.time():.6f}\n")
            optimizer.zero_grad()  # asks for the quorum, which is formed while the step computes
            time.sleep(step_s)  # the pretended work
            nn.functional.mse_loss(replica(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
