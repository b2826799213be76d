"""Compare each adaptive part with the best fixed setting, and with the setting that a user starts from.

    sudo env PATH=$PATH python benchmarks/adaptation_pays.py [--parts split,batch,sparsity,density,strategy] [--seeds 3]

Each part trains one model on three workers of speed 1 : 0.6 : 0.3 (scripts/paced_mnist.py), an island each, in network
namespaces whose links are shaped alike for all arms. The arms of a part differ in nothing but the setting that the part
adapts. The figure is the time from rank 0's first step until its weights reach the target accuracy on 5,000 test
images. Weights are read twice a second by this process. Arms alternate within a seed, so a machine that becomes slower
does so for all of them. `--seeds 1` is the short form.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
sys.path[:0] = [str(HERE), str(HERE / "scripts"), str(EXAMPLES)]

from adaptive_batch import LEARNING_RATE, MOST, OWN_BATCH, Judge, Reached, watch
from lab.machine import processor
from lab.network import Network, refuse_without_tools
from loop_wan import cli, cluster
from paced_mnist import SPEEDS

RATES: Final = {"cnn": LEARNING_RATE, "mlp": 1e-3}
"""Learning rate of a batch of OWN_BATCH, by model: that of SGD and that of AdamW."""
Segment = tuple[float | None, float]  # Mbit/s of every link (None: not limited), and for how many seconds


@dataclass(frozen=True, slots=True)
class Arm:
    """settings: lines of a job file. batch: total batch of the script, whose learning rate follows its root."""

    name: str
    settings: str
    batch: int = OWN_BATCH


@dataclass(frozen=True, slots=True)
class Part:
    """default: the name of the arm that a user starts from. adaptive: that of the arm that Atoll adapts. links: repeat
    until the run ends; of a single segment they never change."""

    name: str
    model: str
    target: float
    links: tuple[Segment, ...]
    arms: tuple[Arm, ...]
    default: str
    adaptive: str


FREE: Final[tuple[Segment, ...]] = ((None, 1e9),)
CHANGING: Final[tuple[Segment, ...]] = ((200.0, 8.0), (10.0, 8.0), (40.0, 8.0))
FALLING: Final[tuple[Segment, ...]] = ((1000.0, 8.0), (20.0, 1e9))
STALE: Final = 'strategy = "stale-sparse"\n[stale_sparse]\nsparsity = '
LOCAL: Final = 'strategy = "local-steps"\n[adapt]\ndensity = false\n[local_steps]\ndensity = '

PARTS: Final = {
    part.name: part
    for part in (
        Part(
            "split",
            "cnn",
            0.965,
            FREE,
            tuple(Arm(name, f'split = "{name}"\n', 256) for name in ("even", "inverse-time", "auto")),
            "even",
            "auto",
        ),
        Part(
            "batch",
            "cnn",
            0.965,
            FREE,
            (
                *(Arm(f"fixed {batch}", "", batch) for batch in (OWN_BATCH, 128, 256, 512)),
                Arm("adaptive", f"[adapt]\nbatch = [{OWN_BATCH}, {MOST}]\n"),
            ),
            f"fixed {OWN_BATCH}",
            "adaptive",
        ),
        Part(
            "sparsity",
            "mlp",
            0.95,
            CHANGING,
            (
                *(Arm(f"fixed {sparsity}", f"{STALE}{sparsity}\n", 128) for sparsity in (0.9, 0.97, 0.99)),
                Arm("adaptive", f"{STALE}0.9\n[adapt]\nsparsity = true\n", 128),
            ),
            "fixed 0.9",
            "adaptive",
        ),
        Part(
            "density",
            "mlp",
            0.95,
            CHANGING,
            (
                *(Arm(f"fixed {density}", f"{LOCAL}{density}\n", 128) for density in (0.2, 0.05, 0.01)),
                Arm("adaptive", 'strategy = "local-steps"\n', 128),
            ),
            "fixed 0.2",
            "adaptive",
        ),
        Part(
            "strategy",
            "mlp",
            0.95,
            FALLING,
            tuple(Arm(name, f'strategy = "{name}"\n', 128) for name in ("dense", "local-steps", "compressed", "auto")),
            "dense",
            "auto",
        ),
    )
}


@contextmanager
def shaped(network: Network, links: Sequence[Segment]) -> Iterator[None]:
    """Shape all links by these segments, again and again, while the block runs."""
    stop = threading.Event()

    def follow() -> None:
        while True:
            for mbit_s, seconds in links:
                network.shape(mbit_s)
                if stop.wait(min(seconds, threading.TIMEOUT_MAX)):
                    return

    thread = threading.Thread(target=follow, name="shaped-links")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        network.shape(None)


def train(
    network: Network, judge: Judge, folder: Path, part: Part, arm: Arm, seed: int, target: float, limit_s: float
) -> Reached:
    """Run one job until its weights reach the target, or for limit_s seconds of training."""
    out = folder / f"{part.name}-{arm.name.replace(' ', '-')}-{seed}"
    out.mkdir()
    (config := out / "job.toml").write_text(arm.settings)
    rate = RATES[part.model] * (arm.batch / OWN_BATCH) ** 0.5
    asked = [str(HERE / "scripts" / "paced_mnist.py"), "--workers", str(len(SPEEDS)), "--checkpoint-every", "0"]
    asked += ["--env", f"PYTHONPATH={os.pathsep.join((str(HERE / 'scripts'), str(EXAMPLES)))}", "--config", str(config)]
    script = [str(out), str(arm.batch), str(rate), str(seed), part.model]
    job = json.loads(cli(network, "submit", *asked, "--json", "--", *script))["job"]
    wait_for_weights(network, job, out)
    with shaped(network, part.links):
        try:
            reached = watch(judge, out, target, limit_s)
        except SystemExit as error:
            raise SystemExit(f"{error}\n{cli(network, 'events', job)}{cli(network, 'logs', job)}") from error
        plans = [line for line in cli(network, "events", job).splitlines() if " plan " in line or "strategy" in line]
    print("\n".join(f"    {line}" for line in plans[-6:]), flush=True)
    cli(network, "cancel", job)
    while json.loads(cli(network, "status", job, "--json"))["phase"] != "cancelled":
        time.sleep(0.2)
    return reached


def wait_for_weights(network: Network, job: str, out: Path) -> None:
    ends = time.monotonic() + 90
    while not list(out.glob("*.npy")):
        if time.monotonic() > ends:
            raise SystemExit(cli(network, "events", job) + cli(network, "logs", job))
        time.sleep(0.05)


def row(part: Part, arm: Arm, found: Sequence[Reached]) -> str:
    times = [float("inf") if one.seconds is None else one.seconds for one in found]
    what = {part.default: " (default)", part.adaptive: " (adaptive)"}.get(arm.name, "")
    best = statistics.median(one.accuracy for one in found)
    steps = statistics.median(one.step for one in found)
    each = ", ".join("not reached" if time == float("inf") else f"{time:.1f}" for time in times)
    return f"| {part.name}: {arm.name}{what} | {statistics.median(times):.1f} | {each} | {steps:.0f} | {best:.2%} |"


def verdict(part: Part, found: dict[str, list[Reached]]) -> str:
    """State by how much the adaptive arm differs from the best fixed one and from the default."""

    def median_s(name: str) -> float:
        return statistics.median(float("inf") if one.seconds is None else one.seconds for one in found[name])

    fixed = min((arm.name for arm in part.arms if arm.name != part.adaptive), key=median_s)
    own_s = median_s(part.adaptive)
    parts = [
        f"{own_s / median_s(name):.2f}x the time of {what} ({name})"
        for what, name in (("the best fixed setting", fixed), ("the default", part.default))
        if median_s(name) < float("inf")
    ]
    return f"{part.name}: adaptive takes {' and '.join(parts) or 'a time that no fixed setting reached'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=75, help="seconds of training after which a run ends")
    parser.add_argument("--target", type=float, help="accuracy in place of each part's own")
    options = parser.parse_args()
    refuse_without_tools()
    chosen = [PARTS[name] for name in options.parts.split(",")]
    print(f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, speeds {SPEEDS}, {options.seeds} seeds")
    rows, verdicts = [], []
    with tempfile.TemporaryDirectory() as folder, Network(len(SPEEDS)) as network, cluster(network, Path(folder)):
        for part in chosen:
            judge, found = Judge(part.model), {arm.name: list[Reached]() for arm in part.arms}
            for seed in range(1, options.seeds + 1):
                for arm in part.arms:
                    target = options.target or part.target
                    own = train(network, judge, Path(folder), part, arm, seed, target, options.limit_s)
                    found[arm.name].append(own)
                    print(f"  {part.name} {arm.name} seed {seed}, load {os.getloadavg()[0]:.1f}: {own}", flush=True)
            rows += [row(part, arm, found[arm.name]) for arm in part.arms]
            verdicts.append(verdict(part, found))
    print("| arm | median s | each seed | steps | accuracy then |\n|---|---|---|---|---|")
    print("\n".join([*rows, "", *verdicts]))


if __name__ == "__main__":
    main()
