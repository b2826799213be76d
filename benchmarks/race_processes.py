"""The race's task with real workers: strategies by the held-out loss of the one model, in processes that exchange.

    python benchmarks/race_processes.py [--size XS] [--steps 600] [--seed 1] [--islands 4]
        [--ways alone,dense,stale-sparse,local-steps,local-steps:density=0.02]

Each island is a worker process of one thread with its own domain (P1 of benchmarks/race.py), the same weights, batches,
inner optimizer and held-out windows as there. A way is a strategy and settings of it after a colon; `alone` trains
without any exchange and tells the best island. Told are the held-out loss of the masters after the last step, and of
the model after run.synchronize(), what an island sent for a parameter and step on the wire, frames and all, and the
median step on this machine, where all islands share its cores, and the processor time that an island takes for a step,
which is the same however busy they are. Drift is how many steps' worth of its own updates an island has not sent, over
all steps.
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
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import torch
from held_ports import free_port
from racing.inner import CLIP, learning_rate
from racing.task import SIZES, Batches, Task, shards

PEAK = 2e-3


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="XS")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--ways", default="alone,dense,stale-sparse,local-steps,local-steps:density=0.02")
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    options = arguments().parse_args()
    if options.island is not None:
        options.told.write_text(json.dumps(trained(options)))
        return 0
    print(f"{datetime.date.today()}  {platform.machine()}  torch {torch.__version__}")
    print(f"{options.size}, {options.islands} islands, {options.steps} steps, seed {options.seed}")
    print("| way | masters | synchronized | sent bytes | drift | step | processor |\n|---|---|---|---|---|---|---|")
    for way in options.ways.split(","):
        found = raced(options, way)
        best = min(found, key=lambda one: one["masters"])
        sent, drift = (statistics.mean(one[what] for one in found) for what in ("sent_bytes", "drift"))
        step_ms, processor_ms = (
            statistics.median(one[what] for one in found) * 1e3 for what in ("step_s", "processor_s")
        )
        losses = f"{best['masters']:.3f} | {best['synchronized']:.3f}"
        print(f"| {way} | {losses} | {sent:.4f} | {drift:.1f} | {step_ms:.0f} ms | {processor_ms:.1f} ms |", flush=True)
    return 0


def raced(options: argparse.Namespace, way: str) -> list[dict[str, float]]:
    """What each island tells at the end."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder, f"{island}.json") for island in range(options.islands)]
        processes = []
        for island, path in enumerate(told):
            env = os.environ | {
                "RANK": str(island), "LOCAL_RANK": str(island), "WORLD_SIZE": str(options.islands),
                "LOCAL_WORLD_SIZE": str(options.islands), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ATOLL_ISLAND": f"island-{island}",
            }  # fmt: skip
            command = [sys.executable, __file__, "--island", str(island), "--told", str(path), "--ways", way]
            command += ["--size", options.size, "--steps", str(options.steps), "--seed", str(options.seed)]
            command += ["--islands", str(options.islands)]
            processes.append(subprocess.Popen(command, env=env))
        codes = [process.wait(timeout=1800) for process in processes]
        if any(codes):
            raise SystemExit(f"race_processes: the islands of {way} ended with {codes}")
        return [json.loads(path.read_text()) for path in told]


class Island:
    """One island's batches and its judge."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps = options.steps
        self.task = Task(SIZES[options.size], options.seed)
        self.model = self.task.model
        for parameter in self.model.parameters():
            parameter.grad, parameter.data = None, parameter.data.clone()  # the race's are of one vector
        part = shards("P1", options.islands, options.seed)[options.island]
        self._batches = Batches(part, self.task.size, options.seed, options.island)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(PEAK, step, self.steps)
        inputs, targets = self._batches.at(step)
        return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def held_out(self, weights: list[torch.Tensor]) -> float:
        """By a copy: the judge loads what it judges."""
        theta = torch.cat([weight.detach().reshape(-1) for weight in weights])
        return Task(self.task.size, 0).held_out(theta)


def trained(options: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    island = Island(options)
    name, _, said = options.ways.partition(":")
    settings = dict(one.split("=") for one in said.split(":")) if said else {}
    if name == "alone":
        return alone(island)
    return together(island, name, {key: json.loads(value) for key, value in settings.items()})


def alone(island: Island) -> dict[str, float]:
    took_s, began_s = [], time.process_time()
    for step in range(island.steps):
        begun_s = time.perf_counter()
        island.loss(island.model, step).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(island.model.parameters(), CLIP)
        island.optimizer.step()
        island.optimizer.zero_grad()
        took_s.append(time.perf_counter() - begun_s)
    processor_s = (time.process_time() - began_s) / island.steps
    loss = island.held_out(list(island.model.parameters()))
    told = {"masters": loss, "synchronized": loss, "sent_bytes": 0.0, "drift": 0.0}
    return told | {"step_s": statistics.median(took_s), "processor_s": processor_s}


def together(island: Island, name: str, settings: dict[str, Any]) -> dict[str, float]:
    import atoll
    from atoll.strategies import registry

    run = atoll.init(seed=1, strategy=registry.find(name).settings(**settings))
    rows = island.task.size.batch * run.world_size
    dataset = torch.utils.data.TensorDataset(torch.arange(rows * island.steps))
    model, optimizer, loader = run.prepare(island.model, island.optimizer, dataset, batch_size=rows)
    took_s: list[float] = []
    found: dict[str, float] = {}
    for _ in run.epochs(1):
        began_s, begun_s = time.process_time(), time.perf_counter()
        for _ in loader:
            assert loader.current is not None  # inside a step
            run.backward(island.loss(model, loader.current.step))
            run.clip_grad_norm(CLIP)
            optimizer.step()
            optimizer.zero_grad()
            took_s.append(time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
        processor_s = (time.process_time() - began_s) / island.steps
        assert run._training is not None
        told = run.statistics()
        sent_bytes = told.get("sent_bytes", 0.0) / island.task.entries / island.steps
        state = run._training._exchange.durable
        run._training._exchange.boundary(wait=True)
        masters = state.masters()
        weights = [masters.get(id(one), one) for one in model.parameters()]
        found = {"masters": island.held_out(weights), "sent_bytes": sent_bytes}
        found |= {"drift": told.get("drift", 0.0)}
        found |= {"step_s": statistics.median(took_s), "processor_s": processor_s}
        run.synchronize()
        found["synchronized"] = island.held_out(list(model.parameters()))
    return found


if __name__ == "__main__":
    sys.exit(main())
