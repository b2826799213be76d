"""Two workers of unequal speed: Atoll's split by measured speed against DDP with even batches.

    python benchmarks/unequal.py [--speed 0.5] [--pairs 3] [--seconds 40]

Both train the CNN of dense_vs_ddp.py, one thread per worker, the second worker slowed by the same throttle. Atoll runs
on a real local cluster; its figure is the median step after the plans have settled (the last half), and what it reached
over the whole time is printed too.
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

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(HERE / "scripts"), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

from cluster import Cluster
from held_ports import free_port

BATCH = 256


def ddp_child(speed: float, seconds: float) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from unequal_train import make

    from atoll.agent.runtime.session.throttle import Throttle

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    throttle = Throttle(speed if rank == 1 else 1.0)
    model, dataset = make()
    replica = DistributedDataParallel(model)

    def slowed(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are strings
        throttle.pay()
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert work is not None
        throttle.resume()
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    replica.register_comm_hook(None, slowed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    share, order, took = BATCH // 2, torch.randperm(len(dataset)), []
    ends = time.monotonic() + seconds
    step, going = 0, torch.ones(1)
    while going.item() > 0:
        before = time.perf_counter()
        start = step * BATCH % (len(dataset) - BATCH) + rank * share
        inputs, labels = (tensor[order[start : start + share]] for tensor in dataset.tensors)
        loss = torch.nn.functional.cross_entropy(replica(inputs), labels)
        throttle.pay()
        torch.autograd.backward(loss)
        throttle.resume()
        optimizer.step()
        optimizer.zero_grad()
        throttle.pay()
        took.append(time.perf_counter() - before)
        step += 1
        if step % 20 == 0:
            going.fill_(float(time.monotonic() < ends))
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
            throttle.resume()
    dist.destroy_process_group()
    print(json.dumps(statistics.median(took[20:])), flush=True)


def ddp(speed: float, seconds: float) -> float:
    port, processes = free_port(), []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, __file__, "--child", "--speed", str(speed), "--seconds", str(seconds)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate(timeout=seconds + 60)[0] for process in processes]
    return float(json.loads(answers[0].splitlines()[-1]))


def atoll(speed: float, seconds: float) -> tuple[float, float, list[int]]:
    """(median step of the last half, median of all, final local batches)."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0, speed])
        out = Path(folder, "steps.json")
        job = cluster.submit(
            str(HERE / "scripts" / "unequal_train.py"), str(out), str(seconds), workers=(2, 2), checkpoint_every=0
        )
        ended = cluster.wait_for_end(job, seconds + 90)
        if not out.exists():
            raise SystemExit(f"the job failed: {ended.reason}\n{cluster.story(job)}")
        took = json.loads(out.read_text())
        shares = [round(worker.share * BATCH) for worker in ended.workers]
        return statistics.median(took[len(took) // 2 :]), statistics.median(took[20:]), shares


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--speed", type=float, default=0.5)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        ddp_child(options.speed, options.seconds)
        return
    print(f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, speeds 1 : {options.speed:g}")
    ratios = []
    for pair in range(options.pairs):
        even = ddp(options.speed, options.seconds / 2)
        settled, whole, shares = atoll(options.speed, options.seconds)
        ratios.append(even / settled)
        print(
            f"pair {pair + 1}: DDP even {even * 1e3:.1f} ms  Atoll {settled * 1e3:.1f} ms settled, "
            f"{whole * 1e3:.1f} ms over all, shares {shares}  speed-up {even / settled:.2f}",
            flush=True,
        )
    print(f"speed-up over DDP with even batches: median {statistics.median(ratios):.2f} "
          f"[{min(ratios):.2f}-{max(ratios):.2f}], n = {len(ratios)}")  # fmt: skip


if __name__ == "__main__":
    main()
