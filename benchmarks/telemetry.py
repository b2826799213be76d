"""Measures what telemetry costs a step: each part by itself, then in runs that have it and have it not, by turns of 20
steps.

    python benchmarks/telemetry.py [--blocks 80] [--runs 3] [--parts-only]

Two workers of one thread each on a real local cluster train the CNN of unequal.py (1.1 M parameters, batch 256). The
goal is below 0.5 % of a step. The paired figure is the mean step of a block with telemetry against that of the block
before and after it without; its error is that of the mean over all pairs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(HERE / "scripts"), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

import torch
import torch.distributed as dist
from cluster import Cluster
from lab.machine import processor
from unequal_train import make

from atoll.agent.runtime.agent_link.outbox import Outbox
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.step.backward.exchange_times import ExchangeTimes
from atoll.agent.runtime.step.backward.gradient_passes import squared_norm
from atoll.agent.runtime.step.drivers.coordination import StepNumbers
from atoll.agent.runtime.step.measures.clock import StepClock, host_mark
from atoll.agent.runtime.step.state.step_reporter import StepReporter
from atoll.agent.runtime.strategy_interface.capabilities import Norms
from atoll.agent.telemetry.collect import Collector
from atoll.agent.telemetry.devices import find_devices
from atoll.agent.telemetry.gauges import gauges_of
from atoll.controller.services.checks import check_telemetry
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import WorkerId

BATCH_STEPS = 10  # that one message carries
REPEATS = 7


def microseconds(work: Callable[[], object], times: int) -> list[float]:
    """Per call, of each repeat."""
    found = []
    for _ in range(REPEATS):
        begun_s = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - begun_s) / times * 1e6)
    return found


def show(what: str, values_us: list[float]) -> None:
    low, high = min(values_us), max(values_us)
    print(f"  {what:62} {statistics.median(values_us):8.1f} us [{low:.1f}-{high:.1f}]", flush=True)


def parts() -> None:
    """Of one step, by where it is spent."""
    clock, outbox = StepClock(), Outbox()
    reporter = StepReporter(outbox)
    batch_slice = BatchSlice(step=1, epoch=0, start=0, total=256, local=128, weight=0.5, share=0.5)
    numbers, norms = StepNumbers(sync_s=0.1, last_sync_s=0.01), Norms(1.0, 1.0)

    def step() -> None:
        clock.boundary_ends()
        clock.handed_out()
        clock.backward_begins(seen=True)
        clock.bucket_ready()
        clock.waited(0.0)
        clock.backward_ends()
        clock.updated()
        reporter.report(batch_slice, clock.boundary_begins(), plan=1, norms=norms, numbers=numbers)

    show("training thread: marks, times, the sample, into the outbox", microseconds(step, 2000))
    outbox.take(WorkerId())
    id_ = WorkerId(job="a-1", run=1, rank=0)
    collector = Collector()

    def filled() -> None:
        for _ in range(BATCH_STEPS):
            step()

    filled()
    message = outbox.take(id_)
    assert message is not None
    show("link's thread: a message of 10 steps, per step", [
        us / BATCH_STEPS for us in microseconds(message.SerializeToString, 2000)
    ])  # fmt: skip

    def collect() -> None:
        collector.add(WorkerKey("a-1", 1, 0), message)
        for telemetry in collector.take():
            check_telemetry(telemetry)

    show("agent's and controller's checks, per step", [us / BATCH_STEPS for us in microseconds(collect, 200)])
    gauges = gauges_of(find_devices())
    show("agent's thread: all gauges, once a second", microseconds(gauges.read, 50))
    gauges.close()
    gradient = torch.randn(1_000_000)
    torch.set_num_threads(1)
    show("two squared norms of 1 M entries, every 10th step, per step", [
        2 * us / 10 for us in microseconds(lambda: squared_norm(gradient), 200)
    ])  # fmt: skip
    exchange()


def exchange() -> None:
    """One all-reduce among one: what is added is the same for many, the network is not."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tensor, times = torch.ones(1000), ExchangeTimes(host_mark)

    def plain() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    def timed() -> None:
        times.begin()
        launched = times.launching()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(launched)
        work.wait()
        times.take()

    show("an all-reduce", microseconds(plain, 500))
    show("an all-reduce that is timed", microseconds(timed, 500))
    dist.destroy_process_group()


def paired(blocks: int) -> tuple[float, list[float]]:
    """Seconds of a step without telemetry, and by how much of it each block with telemetry differs."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0, 1.0])
        out = Path(folder, "steps.json")
        script = str(HERE / "scripts" / "telemetry_train.py")
        job = cluster.submit(script, str(out), str(blocks), workers=(2, 2), checkpoint_every=0)
        ended = cluster.wait_for_end(job, 600)
        if not out.exists():
            raise SystemExit(f"the job failed: {ended.reason}\n{cluster.story(job)}")
        means = [statistics.fmean(block) for block in json.loads(out.read_text())]
    settled = means[4:]  # the first pay for allocations and the first plan
    differences = []
    for number in range(2, len(settled) - 1, 2):  # with telemetry are the even ones
        without = (settled[number - 1] + settled[number + 1]) / 2
        differences.append(settled[number] / without - 1)
    return statistics.median(settled[1::2]), differences


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=80)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--parts-only", action="store_true")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}")
    parameters = sum(parameter.numel() for parameter in make()[0].parameters())
    parts()
    if options.parts_only:
        return
    together: list[float] = []
    print(f"two workers, {parameters / 1e6:.2f} M parameters, blocks of 20 steps with and without:")
    for _ in range(options.runs):
        step_s, differences = paired(options.blocks)
        together += differences
        with_it = f"{100 * statistics.median(differences):+.2f} %"
        print(f"  step {step_s * 1e3:.1f} ms, with telemetry {with_it} (median of pairs)", flush=True)
    mean, error = statistics.fmean(together), statistics.stdev(together) / len(together) ** 0.5
    median = statistics.median(together)
    print(f"  all {len(together)} pairs: median {100 * median:+.2f} %, mean {100 * mean:+.2f} ± {100 * error:.2f} %")


if __name__ == "__main__":
    main()
