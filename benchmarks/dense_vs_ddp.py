"""Strategy `dense` against plain DistributedDataParallel: steps per second of the same two workers, in pairs.

    python benchmarks/dense_vs_ddp.py [--pairs 5] [--steps 120]

Each pair runs DDP and Atoll one after the other (order swapped every time): two processes of one thread each, the same
model, batch and optimizer. DDP gets the cheapest loader there is: slices of tensors in memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import TensorDataset

    Criterion: TypeAlias = Callable[[Tensor, Tensor], Tensor]

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

from held_ports import free_port

WARMUP_STEPS = 20


def run_pair(kind: str, model: str, steps: int) -> float:
    """Median seconds per step of rank 0, over the steps after the warm-up."""
    port = free_port()
    processes = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, __file__, "--child", kind, "--model", model, "--steps", str(steps)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{kind} failed with {[process.returncode for process in processes]}")
    seconds: list[float] = json.loads(answers[0].splitlines()[-1])
    return statistics.median(seconds[WARMUP_STEPS:])


def child(kind: str, name: str, steps: int) -> None:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module
    if name == "cnn":
        model = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(64 * 7 * 7, 320), nn.ReLU(), nn.Linear(320, 10)),
        )
        dataset = torch.utils.data.TensorDataset(torch.randn(16384, 1, 28, 28), torch.randint(10, (16384,)))
        batch = 256
    else:
        from byte_gpt import ByteGPT

        model = nn.Sequential(ByteGPT(width=192, layers=4, heads=6, context=64), nn.Flatten(0, 1))
        dataset = torch.utils.data.TensorDataset(torch.randint(256, (4096, 64)), torch.randint(256, (4096, 64)))
        batch = 32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loop = ddp_loop if kind == "ddp" else atoll_loop
    seconds = []
    before = time.perf_counter()
    for _ in loop(
        model, optimizer, dataset, batch, steps, lambda out, y: nn.functional.cross_entropy(out, y.flatten())
    ):
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    print(json.dumps(seconds), flush=True)


def ddp_loop(
    model: nn.Module, optimizer: Optimizer, dataset: TensorDataset, batch: int, steps: int, criterion: Criterion
) -> Iterator[None]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
    rank, share = dist.get_rank(), batch // 2
    order = torch.randperm(len(dataset))
    for step in range(steps):
        start = step * batch % (len(dataset) - batch) + rank * share
        inputs, labels = (tensor[order[start : start + share]] for tensor in dataset.tensors)
        torch.autograd.backward(criterion(replica(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        yield
    dist.destroy_process_group()


def atoll_loop(
    model: nn.Module, optimizer: Optimizer, dataset: TensorDataset, batch: int, steps: int, criterion: Criterion
) -> Iterator[None]:
    import atoll

    run = atoll.init(seed=1)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=batch)
    done = 0
    for _ in run.epochs(10_000):
        for inputs, labels in loader:
            run.backward(criterion(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            yield
            done += 1
            if done == steps:
                run.close()
                return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--model", choices=("cnn", "gpt"))
    parser.add_argument("--child", choices=("ddp", "atoll"))
    options = parser.parse_args()
    if options.child:
        child(options.child, options.model, options.steps)
        return
    print(f"{datetime.date.today()}  {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    for model in (options.model,) if options.model else ("cnn", "gpt"):
        rows = []
        for pair in range(options.pairs):
            order = ("ddp", "atoll") if pair % 2 == 0 else ("atoll", "ddp")
            took = {kind: run_pair(kind, model, options.steps) for kind in order}
            rows.append((took["ddp"], took["atoll"], took["atoll"] / took["ddp"]))
            print(f"{model} pair {pair + 1}: DDP {rows[-1][0] * 1e3:.2f} ms  dense {rows[-1][1] * 1e3:.2f} ms  "
                  f"ratio {rows[-1][2]:.3f}", flush=True)  # fmt: skip
        ratios = sorted(row[2] for row in rows)
        print(f"{model}: dense/DDP step time, median of {len(rows)} pairs {statistics.median(ratios):.3f} "
              f"[{ratios[0]:.3f}-{ratios[-1]:.3f}]")  # fmt: skip


if __name__ == "__main__":
    main()
