"""The live loop over links whose bandwidth changes: does sparsity follow, and is it worth it?

    sudo env PATH=$PATH python benchmarks/loop_wan.py [--rates 480,40,200 | --rates trace] [--each-s 40]
        [--policies fixed:0.9,fixed:0.99,rate,both] [--profile-probes 8] [--scale 0.2]

Controller, etcd and two agents in two network namespaces, an island each, joined by shaped links that carry everything:
training, telemetry and plans. The MLP of the laboratory (25.3 M parameters, MNIST, 64 samples a worker). Each policy
trains over the same bandwidths: `fixed:R` at one sparsity, `rate` with `[adapt] sparsity = true` from 0.99, `both` with
total batch too, by an offline profile that `atoll profile` makes first (a few minutes; --profile FILE takes one
that is there). `--rates trace` follows traces/wan.csv, 50 to 600 Mbit/s, times --scale, for three times --each-s. The
short form is --rates trace --each-s 15 --profile-probes 3 --profile-samples 1600.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from lab import trace
from lab.machine import processor
from lab.network import Network, refuse_without_tools
from lab.options import Rate

PORT = 7711
BATCHES = (64, 384)  # of both workers, 128 in the script
PATHS = os.pathsep.join((str(HERE / "scripts"), str(HERE.parent / "examples")))


def cli(network: Network, *arguments: str) -> str:
    address = f"{network.address(0)}:{PORT}"
    argv = [sys.executable, "-m", "atoll.cli.main", "--controller", address, *arguments]
    done = subprocess.run(network.inside(0, argv), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise SystemExit(f"atoll {' '.join(arguments)}: {done.stderr}")
    return done.stdout


@contextmanager
def cluster(network: Network, folder: Path, agents: int | None = None) -> Iterator[None]:
    """A controller in the first namespace, an agent in each, or in so many."""
    agents = network.workers if agents is None else agents
    address = f"{network.address(0)}:{PORT}"
    atoll = [sys.executable, "-m", "atoll.cli.main"]
    commands = [(0, [*atoll, "controller", "--listen", address, "--insecure", "--data-dir", str(folder / "head")])]
    for i in range(agents):
        agent = [*atoll, "agent", "--controller", address, "--name", f"site-{i}", "--island", f"site-{i}"]
        agent += ["--address", network.address(i), "--state-dir", str(folder / f"site-{i}"), "--threads", "1"]
        commands.append((i, [*agent, "--jobs-dir", str(folder / f"jobs-{i}")]))
    with (folder / "log").open("wb") as log:
        started = [
            subprocess.Popen(network.inside(i, argv), stdout=log, stderr=log, start_new_session=True)
            for i, argv in commands
        ]
    try:
        ends = time.monotonic() + 40
        while cli_nodes(network) < agents:
            if time.monotonic() > ends:
                raise SystemExit(f"the agents did not come:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


def cli_nodes(network: Network) -> int:
    try:
        nodes = json.loads(cli(network, "nodes", "--json"))["nodes"]
    except SystemExit:
        return 0
    return sum(node["connected"] for node in nodes)


def make_profile(out: Path, probes: int, samples: int) -> None:
    """Of the model that trains. samples: of a trial."""
    options = ["--out", str(out), "--probes", str(probes), "--samples", str(samples)]
    options += ["--batch", "{}:{}".format(*BATCHES)]
    script = str(HERE / "scripts" / "follow_train.py")
    argv = [sys.executable, "-m", "atoll.cli.main", "profile", script, *options]
    began_s = time.monotonic()
    subprocess.run([*argv, "--", "mlp", os.devnull], env=os.environ | {"PYTHONPATH": PATHS}, timeout=1800, check=True)
    print(f"profiled in {time.monotonic() - began_s:.0f} s", flush=True)


def job_file(folder: Path, policy: str, profile: Path) -> Path:
    """What the policy leaves to the controller."""
    adapt = {"fixed": "", "rate": "[adapt]\nsparsity = true\n"}.get(policy, "")
    if policy == "both":
        adapt = (
            f'[adapt]\nsparsity = true\nbatch = {list(BATCHES)}\nlearning_rate = "square-root"\nprofile = "{profile}"\n'
        )
    path = folder / f"{policy}.toml"
    path.write_text(adapt)
    return path


@contextmanager
def bandwidths(network: Network, rates: str, each_s: float, scale: float) -> Iterator[Sequence[tuple[str, float]]]:
    """Names and lengths of the parts of a run; `shape` of a part's name sets its bandwidth, but a trace is followed."""
    if rates == "trace":
        with network.shaped(Rate.parse("trace"), trace.read(trace.WAN).scaled(scale)):
            yield [("trace", each_s)] * 3
    else:
        yield [(rate, each_s) for rate in rates.split(",")]
        network.shape(None)


def train(
    network: Network, folder: Path, policy: str, profile: Path, options: argparse.Namespace
) -> list[dict[str, float]]:
    """The steps of rank 0 under this policy, while the links go through these rates."""
    name, _, rate = policy.partition(":")
    out = folder / f"steps-{name}-{rate}.jsonl"
    script = [str(HERE / "scripts" / "follow_train.py"), "--workers", "2", "--checkpoint-every", "0"]
    script += ["--env", f"PYTHONPATH={PATHS}", "--strategy", "stale-sparse", "--sparsity", rate or "0.99"]
    script += ["--config", str(job_file(folder, name, profile))]
    job = json.loads(cli(network, "submit", *script, "--json", "--", "mlp", str(out)))["job"]
    ends = time.monotonic() + 60
    while not (out.exists() and out.read_text()):
        if time.monotonic() > ends:
            raise SystemExit(cli(network, "events", job) + cli(network, "logs", job))
        time.sleep(0.2)
    with bandwidths(network, options.rates, options.each_s, options.scale) as parts:
        for mbit_s, seconds in parts:
            if mbit_s != "trace":
                network.shape(float(mbit_s))
            watch(network, job, f"{policy:10} {mbit_s:>5}", seconds)
    steps = [json.loads(line) for line in out.read_text().splitlines()]
    for line in cli(network, "events", job).splitlines():
        if " plan " in line:
            print(f"    {line}")
    cli(network, "cancel", job)
    while json.loads(cli(network, "status", job, "--json"))["phase"] != "cancelled":
        time.sleep(0.2)
    return steps


def watch(network: Network, job: str, what: str, seconds: float) -> None:
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        time.sleep(min(seconds / 4, 10))
        seen = json.loads(cli(network, "status", job, "--json"))
        progress, batch = seen["progress"], sum(worker["last"]["local_batch"] for worker in seen["workers"])
        exchange = progress["strategy_metrics"]
        print(
            f"  {what}, {time.monotonic() - began:4.0f} s on: step {progress['step']:4} "
            f"{progress['step_s'] * 1e3:5.0f} ms, stall {exchange['stall_share']:5.1%}, "
            f"sparsity {exchange['sparsity']:.4f}, batch {batch}, plan {seen['plan']['id']}",
            flush=True,
        )


def first_at(steps: Sequence[dict[str, float]], smooth: Sequence[float], target: float) -> str:
    """When the mean of ten losses was first at or under the target."""
    first = next((i + 9 for i, loss in enumerate(smooth) if loss <= target), None)
    return "not reached" if first is None else f"{steps[first]['at_s']:.1f} s, {first + 1} steps"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", default="480,40,200", help="Mbit/s, one after the other; or `trace`")
    parser.add_argument("--each-s", type=float, default=40)
    parser.add_argument("--policies", default="fixed:0.9,fixed:0.99,rate,both")
    parser.add_argument("--profile", type=Path, help="made before; else one is made where `both` is asked for")
    parser.add_argument("--profile-probes", type=int, default=8)
    parser.add_argument("--profile-samples", type=int, default=12_800, help="that each trial trains on")
    parser.add_argument("--scale", type=float, default=1.0, help="of the trace's bandwidths")
    parser.add_argument("--targets", default="0.3,0.2,0.15", help="training losses of rank 0, means of 10 steps")
    options = parser.parse_args()
    targets = [float(target) for target in options.targets.split(",")]
    refuse_without_tools()
    rates = f"{options.rates} Mbit/s" + (f" times {options.scale:g}" if options.scale != 1 else "")
    print(f"{datetime.date.today()}  {processor()}, {rates}, {options.each_s:g} s each")
    rows = []
    with tempfile.TemporaryDirectory() as folder, Network(2) as network, cluster(network, Path(folder)):
        profile = options.profile or Path(folder, "mlp.profile.json")
        if "both" in options.policies and options.profile is None:
            make_profile(profile, options.profile_probes, options.profile_samples)
        for policy in options.policies.split(","):
            steps = train(network, Path(folder), policy, profile.resolve(), options)
            losses = [step["loss"] for step in steps]
            smooth = [statistics.fmean(losses[i - 9 : i + 1]) for i in range(9, len(losses))]
            reached = [first_at(steps, smooth, target) for target in targets]
            rows.append(f"| `{policy}` | {len(steps)} | {smooth[-1]:.3f} | {' | '.join(reached)} |")
            print(rows[-1], flush=True)
    print(f"| | steps | loss at the end | {' | '.join(f'to {target:g}' for target in targets)} |")
    print("|---|---|---|" + "---|" * len(targets))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
