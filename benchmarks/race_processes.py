"""The race's task with real workers: strategies by the held-out loss of the one model, in processes that exchange.

    python benchmarks/race_processes.py [--size XS] [--steps 600] [--seeds 1] [--islands 4] [--partition P1] [--absent]
        [--pace-s 0.4] [--ways alone,dense,stale-sparse,local-steps,local-steps:density=0.02]

Each island is a worker process of one thread with the data of benchmarks/race.py's partition, the same weights,
batches, inner optimizer and held-out windows as there, and of P3 the same unequal batches, by a plan's shares. A way is
a strategy and settings of it after a colon; `alone` trains without any exchange and tells the best island. Told are the
held-out loss of the shared parameters after the last step, and of the model after run.synchronize(), what an island
sent for a parameter and step on the wire, frames and all, and the median step on this machine, where all islands share
its cores, and the processor time that an island takes for a step, which is the same however busy they are. Drift is how
many steps' worth of its own updates an island has not sent, over all steps.

--absent: the last island's worker gets SIGKILL at 40 % of the steps. The others go on in place from memory, where two
machines have each island's state, with what it had not sent; at 60 % another worker takes its place, or as soon as it
is ready: --pace-s gives it time, as steps of other machines would. Agent and controller are played as in the tests.
Told is at which steps that was, and from which the others went on; bytes are of the steps since.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests/runtime")]

import torch
from held_ports import free_port
from racing.inner import CLIP, learning_rate
from racing.task import PARTITIONS, SIZES, Batches, Task, loss_of, shards
from zmq_agent import FakeAgent

import atoll
from atoll.strategies import registry
from atoll.strategies.declaration import as_json
from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_READY, VIEW_STAGE_TRAINING

MOST_S = 1800.0
"""That a run may take."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="XS")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="1", help="separated by commas")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--partition", choices=PARTITIONS, default="P1")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of the byte GPT's, as the race tries them")
    parser.add_argument("--ways", default="alone,dense,stale-sparse,local-steps,local-steps:density=0.02")
    parser.add_argument("--absent", action="store_true", help="an island is gone from 40 to 60 %% of the steps")
    parser.add_argument("--pace-s", type=float, default=0.0, help="pretended work in each step")
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)  # in an island's process: the folder
    return parser


def main() -> int:
    options = arguments().parse_args()
    if options.told is not None:
        island = int(os.environ["RANK"])
        (options.told / f"{island}.json").write_text(json.dumps(trained(options, island)))
        return 0
    print(f"{datetime.date.today()}  {platform.machine()}  torch {torch.__version__}")
    print(f"{options.size}, {options.islands} islands, {options.steps} steps")
    print("| way | seed | shared parameters | synchronized | sent bytes | drift | advantage | step | processor |")
    print("|---|---|---|---|---|---|---|---|---|")
    for way, seed in itertools.product(options.ways.split(","), options.seeds.split(",")):
        unequal = options.partition == "P3" and way != "alone"
        race = left_and_back if options.absent else by_plan if unequal else raced
        found = race(options, way, seed)
        best = min(found, key=lambda one: one["shared_params"])
        sent, drift, ahead = (
            statistics.mean(one[what] for one in found) for what in ("sent_bytes", "drift", "advantage")
        )
        step_ms, processor_ms = (
            statistics.median(one[what] for one in found) * 1e3 for what in ("step_s", "processor_s")
        )
        losses = f"{best['shared_params']:.3f} | {best['synchronized']:.3f}"
        figures = f"{losses} | {sent:.4f} | {drift:.1f} | {ahead:.2f} | {step_ms:.0f} ms | {processor_ms:.1f} ms"
        print(f"| {way} | {seed} | {figures} |", flush=True)
    return 0


def command(options: argparse.Namespace, way: str, seed: str, folder: str) -> list[str]:
    """Of an island's process, without the interpreter."""
    said = {"told": folder, "ways": way, "size": options.size, "steps": options.steps, "seeds": seed}
    said |= {"islands": options.islands, "pace-s": options.pace_s, "learning-rate": options.learning_rate}
    said |= {"partition": options.partition}
    return [__file__, *(word for name, value in said.items() for word in (f"--{name}", str(value)))]


def told(folder: str, islands: int) -> list[dict[str, float]]:
    return [json.loads(Path(folder, f"{island}.json").read_text()) for island in range(islands)]


def raced(options: argparse.Namespace, way: str, seed: str) -> list[dict[str, float]]:
    """What each island tells at the end."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for island in range(options.islands):
            env = os.environ | {
                "RANK": str(island), "LOCAL_RANK": str(island), "WORLD_SIZE": str(options.islands),
                "LOCAL_WORLD_SIZE": str(options.islands), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ATOLL_ISLAND": f"island-{island}",
            }  # fmt: skip
            processes.append(subprocess.Popen([sys.executable, *command(options, way, seed, folder)], env=env))
        codes = [process.wait(timeout=MOST_S) for process in processes]
        if any(codes):
            raise SystemExit(f"race_processes: the islands of {way} ended with {codes}")
        return told(folder, options.islands)


@contextmanager
def played_agent(options: argparse.Namespace, way: str, folder: str) -> Iterator[FakeAgent]:
    """Of all islands; with the shares of the partition."""
    name, settings = parsed(way)
    with FakeAgent(Path(folder), world_size=options.islands) as agent:
        agent.spec.strategy, agent.spec.strategy_settings = name, as_json(settings)
        agent.shares = [one.batches for one in shards(SIZES[options.size], options.partition, options.islands, 0)]
        yield agent


def by_plan(options: argparse.Namespace, way: str, seed: str) -> list[dict[str, float]]:
    """As `raced`, with batches as a plan shares them out."""
    with tempfile.TemporaryDirectory() as folder, played_agent(options, way, folder) as agent:
        places = [f"island-{island}" for island in range(options.islands)]
        agent.place(places, places)
        script, *arguments = command(options, way, seed, folder)
        agent.start_workers(script, *arguments)
        codes = agent.exit_codes(MOST_S)
        if any(codes):
            raise SystemExit(f"race_processes: the islands of {way} ended with {codes}\n{agent.said()}")
        return told(folder, options.islands)


def left_and_back(options: argparse.Namespace, way: str, seed: str) -> list[dict[str, float]]:
    """As `raced`, where the last island is lost and taken back."""
    *left, lost = range(options.islands)
    with tempfile.TemporaryDirectory() as folder, played_agent(options, way, folder) as agent:
        agent.makes_views, agent.own_directories, agent.memory = True, True, Path(folder, "memory")
        agent.spec.checkpoint.memory_replicas = 2
        places = [f"island-{island}" for island in (*left, lost, lost)]
        agent.place(places, places)
        script, *arguments = command(options, way, seed, folder)

        def step_is(share: float) -> None:
            agent.wait_until(lambda: agent.alive.get(0, (0, 0))[0] >= share * options.steps, MOST_S)

        def resumed_at(view: int) -> int:
            """The step from which it does."""
            agent.put_in_force()
            return next(one.step for one in agent.stands[0] if (one.view, one.stage) == (view, VIEW_STAGE_TRAINING))

        agent.start_workers(script, *arguments)
        step_is(0.4)
        agent.workers[lost].send_signal(signal.SIGKILL)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, *left)
        killed_at = agent.stands[0][-1].step
        agent.send_view(2, left, agent.shares[: len(left)], plan_id=2)
        from_memory = resumed_at(2)
        back = agent.start_joiner(script, *arguments)
        agent.wait_until(lambda: agent.stands_at(back)[1] == VIEW_STAGE_READY, MOST_S)
        step_is(0.6)
        members = [*left, back]
        agent.send_view(3, members, agent.shares, plan_id=3, in_force=2, without_state=[back], at_boundary=True)
        print(f"{way}, seed {seed}: lost in step {killed_at}, the others from {from_memory}, back from {resumed_at(3)}")
        codes = agent.exit_codes(MOST_S)
        if codes != [0] * len(left) + [-signal.SIGKILL, 0] or any("is lost" in text for text in agent.warnings):
            raise SystemExit(f"race_processes: the islands of {way} ended with {codes}\n{agent.said()}")
        return told(folder, options.islands)


def parsed(way: str) -> tuple[str, dict[str, Any]]:
    """The strategy and its settings."""
    name, *said = way.split(":")
    return name, {key: json.loads(value) for key, _, value in (one.partition("=") for one in said)}


class Island:
    """One island's batches and its judge."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self.steps, self.islands, self.pace_s = options.steps, options.islands, options.pace_s
        seed = int(options.seeds)
        self.task = Task(SIZES[options.size], seed)
        self._peak = self.task.size.rate * options.learning_rate
        self.model = self.task.own_model()
        part = shards(self.task.size, options.partition, options.islands, seed)[number]
        self._batches = Batches(part, self.task.size, seed, number)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self._peak, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._peak, step, self.steps)
        inputs, targets = self._batches.at(step)
        return loss_of(model(inputs), targets)

    def held_out(self, weights: list[torch.Tensor]) -> float:
        """By a copy: the judge loads what it judges."""
        theta = torch.cat([weight.detach().reshape(-1) for weight in weights])
        return Task(self.task.size, 0).held_out(theta)


def trained(options: argparse.Namespace, number: int) -> dict[str, float]:
    torch.set_num_threads(1)
    island, (name, settings) = Island(options, number), parsed(options.ways)
    return alone(island) if name == "alone" else together(island, name, settings)


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
    found = {"shared_params": loss, "synchronized": loss, "sent_bytes": 0.0, "drift": 0.0, "advantage": 0.0}
    return found | {"step_s": statistics.median(took_s), "processor_s": processor_s}


def together(island: Island, name: str, settings: dict[str, Any]) -> dict[str, float]:
    run = atoll.init(seed=1, strategy=registry.find(name).settings(**settings))
    rows = island.task.size.batch * island.islands
    dataset = torch.utils.data.TensorDataset(torch.arange(rows * island.steps))
    model, optimizer, loader = run.prepare(island.model, island.optimizer, dataset, batch_size=rows)
    took_s: list[float] = []
    found: dict[str, float] = {}
    for _ in run.epochs(1):
        began_s, begun_s = time.process_time(), time.perf_counter()
        for _ in loader:
            assert loader.current is not None  # inside a step
            time.sleep(island.pace_s)
            run.backward(island.loss(model, loader.current.step))
            run.clip_grad_norm(CLIP)
            optimizer.step()
            optimizer.zero_grad()
            took_s.append(time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
        processor_s = (time.process_time() - began_s) / island.steps
        assert run._training is not None
        figures = run.statistics()
        sent_bytes = figures.get("sent_bytes", 0.0) / island.task.entries / island.steps
        state = run._training._current.driver.durable
        run._training._current.driver.boundary(wait=True)
        shared_params = state.shared_params()
        weights = [shared_params.get(id(one), one) for one in model.parameters()]
        found = {"shared_params": island.held_out(weights), "sent_bytes": sent_bytes}
        found |= {name: figures.get(name, 0.0) for name in ("drift", "advantage")}
        found |= {"step_s": statistics.median(took_s), "processor_s": processor_s}
        run.synchronize()
        found["synchronized"] = island.held_out(list(model.parameters()))
    return found


if __name__ == "__main__":
    sys.exit(main())
