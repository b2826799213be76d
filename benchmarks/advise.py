"""Steps that `atoll advise` predicts against measured ones: two real workers in namespaces, one core each, thin links.

    sudo env PATH=$PATH python benchmarks/advise.py [--rates 20,100,500] [--strategies dense,local-steps] [--steps 14]

Each strategy trains the same script over each rate after `atoll advise` has predicted it. A prediction is right if it
is within FACTOR of the measured step. Exit code 1 if one of strategy `dense` is not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from lab.machine import processor
from lab.network import BURST, DEVICE, Network, refuse_without_tools

SCRIPT: Final = ROOT / "benchmarks/scripts/advised.py"
WORKERS: Final = 2
RTT_MS: Final = 0.2
"""Round trip of a pair of namespaces."""
WARM_UP: Final = 4
FACTOR: Final = 1.5
FULL_BUCKET_MBIT: Final = 200.0
"""Rate from which a small bucket is empty before a busy machine fills it again."""
RUN_S: Final = 600.0
PORT: Final = 29417


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def predicted(mbit_s: float) -> dict[str, Any]:
    """Return what `atoll advise` says, each worker on one core."""
    command = [sys.executable, "-m", "atoll.cli.main", "advise", str(SCRIPT), "--workers", str(WORKERS), "--json"]
    command += ["--bandwidth", f"{mbit_s:g}M", "--rtt", f"{RTT_MS}ms", "--islands", str(WORKERS)]
    done = subprocess.run(command, check=True, env=environment(), stdout=subprocess.PIPE, timeout=RUN_S)
    advice: dict[str, Any] = json.loads(done.stdout)
    return advice


def measured_s(network: Network, strategy: str, steps: int) -> float:
    """Return rank 0's median seconds of a step behind the warm-up."""
    processes = []
    for rank in range(WORKERS):
        env = environment() | {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(WORKERS), "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICE,
            "ATOLL_ISLAND": f"island-{rank}", "STRATEGY": strategy, "STEPS": str(steps),
        }  # fmt: skip
        command = network.inside(rank, [sys.executable, str(SCRIPT)])
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    ends_s = time.monotonic() + RUN_S
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < ends_s:
            if any(process.returncode for process in processes):
                break  # the other one would wait for it
            time.sleep(0.2)
        answers = [process.communicate(timeout=10)[0] for process in processes if process.poll() == 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    if any(process.returncode for process in processes):
        raise SystemExit(f"{strategy} failed with {[process.returncode for process in processes]}")
    seconds: list[float] = json.loads(answers[0].splitlines()[-1])
    return statistics.median(seconds[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", default="20,100,500")
    parser.add_argument("--strategies", default="dense,compressed,stale-sparse,local-steps")
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    refuse_without_tools()
    print(f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d} {processor()}, load {os.getloadavg()[0]:.1f}")
    print("| Mbit/s | strategy | predicted | measured | predicted / measured | |\n|---|---|---|---|---|---|")
    wrong = 0
    for rate in map(float, options.rates.split(",")):
        advice = predicted(rate)
        steps_s = {one["name"]: one["step_s"] for one in advice["strategies"]}
        with Network(WORKERS) as network:
            network.shape(rate, burst="1mb" if rate > FULL_BUCKET_MBIT else BURST)
            for strategy in options.strategies.split(","):
                if steps_s[strategy] is None:
                    continue
                found_s = measured_s(network, strategy, options.steps)
                ratio = steps_s[strategy] / found_s
                right = 1 / FACTOR <= ratio <= FACTOR
                wrong += strategy == "dense" and not right
                mark = "chosen" if strategy == advice["chosen"] else ""
                times = f"{1000 * steps_s[strategy]:.0f} ms | {1000 * found_s:.0f} ms"
                print(f"| {rate:g} | {strategy} | {times} | {ratio:.2f} | {mark} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
