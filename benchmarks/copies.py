"""Copies of checkpoints over shaped links: how fast they go while links are idle, and what they cost training.

    sudo env PATH=$PATH python benchmarks/copies.py [--only goodput,overhead,thin] [--short]
        [--rates 10] [--strategies local-steps,stale-sparse] [--width 2460] [--for-s 240]

goodput: two senders in two network namespaces, nothing else; seconds from `send` to the last byte in the holder's
file, against the link's rate and against one TCP stream. overhead: controller, agents and two workers in two
namespaces, whose passes wait in place of computing; blocks of steps with generations and without, in turn, in one run.
thin: the same beside an exchange whose density the controller plans by what links bear, --rates in Mbit/s: what of the
link the exchange takes in the second half of --for-s, and what copies; `memory_replicas` 1 beside it has none.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from lab.machine import processor
from lab.network import Network, refuse_without_tools
from lab.options import Rate
from lab.probe import probe
from lab.trace import WAN, read
from loop_wan import cli, cluster

from atoll.agent.runtime.transport.keys import generate

DEADLINE_S = 150.0
SCRIPTS = HERE / "scripts"
PEER = SCRIPTS / "copies_peer.py"
STEPS_A_BLOCK = 20


class Peer:
    """One sender's process."""

    def __init__(self, network: Network, asked: dict[str, Any]) -> None:
        argv = network.inside(asked["rank"], [sys.executable, str(PEER), json.dumps(asked)])
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> str:
        pipe = self.process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], DEADLINE_S)[0] or not (line := pipe.readline()):
            raise SystemExit("a sender's process said nothing")
        return line.strip()

    def say(self, line: str) -> None:
        pipe: IO[str] | None = self.process.stdin
        assert pipe is not None
        pipe.write(line + "\n")
        pipe.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def goodput(mbit_s: float, rtt_ms: float, size: int, copies: int) -> str:
    """A row of the table."""
    pairs = [generate() for _ in range(2)]
    public = [own.hex() for _, own in pairs]
    with Network(2, rtt_ms) as network, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rate = Rate.parse(f"{mbit_s:g}")
        stream = probe(network, rate, read(WAN))
        network.shape(mbit_s)
        common = {"public": public, "bytes": size, "copies": copies, "folder": folder, "parent": os.getpid()}
        peers = [
            Peer(network, {**common, "rank": rank, "host": network.address(rank), "secret": pairs[rank][0].hex()})
            for rank in range(2)
        ]
        try:
            told = " ".join([peer.hear() for peer in peers])
            for peer in peers:
                peer.say(told)
            took_s, cpu_s = [], [list[float](), list[float]()]
            for _ in range(copies):
                peers[0].say("go")
                ends = [json.loads(peer.hear()) for peer in peers]
                took_s.append(ends[1]["at_s"] - ends[0]["at_s"])
                for side, end in zip(cpu_s, ends, strict=True):
                    side.append(end["cpu_s"])
            path = json.loads(peers[0].hear())
        finally:
            for peer in peers:
                peer.close()
    rates = sorted(8e-6 * size / one for one in took_s[1:])
    middle, first = statistics.median(rates), 8e-6 * size / took_s[0]
    cores = [sum(side[1:]) / sum(took_s[1:]) for side in cpu_s]
    cells = (
        f"{mbit_s:g} Mbit/s, RTT {rtt_ms:g} ms",
        stream.partition(": ")[2],
        f"{middle:.0f} Mbit/s ({rates[0]:.0f} to {rates[-1]:.0f}, {len(rates)} of {size / 1e6:g} MB; the first "
        f"{first:.0f})",
        f"{100 * middle / mbit_s:.1f} %",
        f"{100 * cores[0]:.0f} %, {100 * cores[1]:.0f} %",
        f"{path['window'] / 1e3:.0f} kB of {path['chunk'] / 1e3:.0f} kB",
    )
    return f"| {' | '.join(cells)} |"


def train(network: Network, folder: Path, blocks: int, width: int, pace_s: float) -> dict[str, Any]:
    """What the job told at its end."""
    out = folder / f"told-{width}.json"
    words = ["--workers", "2", "--checkpoint-every", "0", "--strategy", "dense", "--env", f"PYTHONPATH={SCRIPTS}"]
    script = [str(SCRIPTS / "copies_train.py"), *words, "--json", "--", str(out), str(blocks), str(width), str(pace_s)]
    job = json.loads(cli(network, "submit", *script))["job"]
    ends_s = time.monotonic() + 60 + 20 * blocks * (4 * pace_s + 1)
    while (phase := json.loads(cli(network, "status", job, "--json"))["phase"]) not in ("done", "failed"):
        if time.monotonic() > ends_s:
            raise SystemExit(cli(network, "events", job) + cli(network, "logs", job))
        time.sleep(1)
    if phase != "done":
        raise SystemExit(cli(network, "events", job) + cli(network, "logs", job))
    for line in cli(network, "events", job).splitlines():
        if "into memory" in line or "in memory" in line:
            print(f"  {line}", file=sys.stderr)
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def overhead(mbit_s: float, blocks: int, width: int, pace_s: float) -> str:
    """A row of the table. Blocks begin with one that writes."""
    with tempfile.TemporaryDirectory() as name, Network(2) as network, cluster(network, Path(name)):
        network.shape(mbit_s)
        told = train(network, Path(name), blocks, width, pace_s)
    means = [statistics.fmean(block) for block in told["took"]]
    pairs = [
        ((means[n - 1] + means[n + 1]) / 2 - means[n]) / means[n] for n in range(1, len(means) - 1, 2)
    ]  # n: a block without, between two with
    mean, error = statistics.fmean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    interval = 1.96 * error
    written = statistics.fmean(told["written"][::2])
    return (
        f"| {mbit_s:g} Mbit/s | {told['parameters'] / 1e6:.1f} M, {told['state_bytes'] / 2e6:.1f} MB a rank | "
        f"{1e3 * statistics.median(means[1::2]):.0f} ms | {written:.1f} of {STEPS_A_BLOCK} steps | "
        f"{100 * mean:+.2f} % ({100 * (mean - interval):+.2f} to {100 * (mean + interval):+.2f}, {len(pairs)} pairs; "
        f"median {100 * statistics.median(pairs):+.2f}) | every {told['every']} | {1e3 * told['cost_s']:.2f} ms | "
        f"{', '.join(f'{1e3 * one:.0f}' for one in told['spans_s'])} ms | {8e-6 * told['bandwidth']:.0f} Mbit/s |"
    )


def thin(mbit_s: float, strategy: str, replicas: int, options: argparse.Namespace) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as name, Network(2) as network, cluster(network, Path(name)):
        network.shape(mbit_s)
        job = follow(network, Path(name), strategy, replicas, options)
        seen = json.loads(cli(network, "status", job, "--json"))
        for line in cli(network, "events", job).splitlines():
            if " plan " in line or "memory" in line:
                print(f"  {line}", file=sys.stderr)
        cli(network, "cancel", job)
        told = [json.loads(line) for line in Path(name, "rank-0.jsonl").read_text().splitlines()]
    half_s = (told[0]["at_s"] + told[-1]["at_s"]) / 2
    first, last = next(one for one in told if one["at_s"] >= half_s), told[-1]
    took_s = last["at_s"] - first["at_s"]
    share = {
        what: 8e-6 * (last[f"{what}_bytes"] - first[f"{what}_bytes"]) / took_s / mbit_s
        for what in ("exchange", "copied", "device")
    }
    changes = [one for one, after in pairwise(told) if after["complete_step"] != one["complete_step"]]
    copied = share["copied"] * mbit_s / 8e-6
    takes = f"{last['state_bytes'] / copied / 60:.1f} min" if copied > 0 else "-"
    metrics = seen["progress"]["strategy_metrics"]
    density = (1 - metrics["sparsity"]) * metrics.get("every", 1)
    cells = (
        f"{mbit_s:g} Mbit/s, {strategy}, {replicas} replica{'s' * (replicas != 1)}",
        f"{last['parameters'] / 1e6:.1f} M, {last['state_bytes'] / 1e6:.0f} MB",
        f"{100 * density:.2f} %",
        f"{1e3 * took_s / (last['step'] - first['step']):.0f} ms",
        *(f"{100 * share[what]:.0f} %" for what in ("exchange", "copied", "device")),
        takes,
        f"{len(changes)}, the newest begun {(last['step'] - last['complete_step'])} steps ago",
    )
    return f"| {' | '.join(cells)} |"


def follow(network: Network, folder: Path, strategy: str, replicas: int, options: argparse.Namespace) -> str:
    """A job that trains for so long, its plans following links."""
    config = folder / "job.toml"
    follows = "[adapt]\nsparsity = true\n" if strategy == "stale-sparse" else ""  # local-steps follows by itself
    config.write_text(f"[checkpoint]\nmemory_replicas = {replicas}\nsite_safe = true\n{follows}")
    words = ["--workers", "2", "--checkpoint-every", "0", "--strategy", strategy, "--config", str(config)]
    words += ["--env", f"PYTHONPATH={SCRIPTS}", "--json", "--", str(folder), str(options.width), str(options.pace_s)]
    job: str = json.loads(cli(network, "submit", str(SCRIPTS / "copies_thin_train.py"), *words))["job"]
    ends_s = time.monotonic() + options.for_s
    while time.monotonic() < ends_s:
        if json.loads(cli(network, "status", job, "--json"))["phase"] in ("done", "failed"):
            raise SystemExit(cli(network, "events", job) + cli(network, "logs", job))
        time.sleep(10)
    return job


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="goodput,overhead")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--rates", default="10", help="thin: Mbit/s, separated by commas")
    parser.add_argument("--strategies", default="local-steps,stale-sparse")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--width", type=int, default=2460, help="thin: of five layers; 2460 makes 25 M parameters")
    parser.add_argument("--pace-s", type=float, default=0.2, help="thin: of a step that waits")
    parser.add_argument("--for-s", type=float, default=240.0)
    options = parser.parse_args()
    refuse_without_tools()
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores", flush=True)
    if "goodput" in options.only:
        print("\n| link | one TCP stream | copies | of the rate | cores, sender and holder | window |")
        print("|---|---|---|---|---|---|")
        copies, part = (3, 4) if options.short else (11, 1)
        for mbit_s, rtt_ms, size in ((1000, 0, 100_000_000), (200, 50, 25_000_000), (50, 50, 10_000_000)):
            print(goodput(mbit_s, rtt_ms, size // part, copies), flush=True)

    if "overhead" in options.only:
        print(
            "\n| links | state | step without | written | longer with (95 % interval) | in the end | cost of one | "
            "idle spans | link |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for width in (512,):
            blocks = 14 if options.short else 84
            print(overhead(1000, blocks, width, 0.3 * (width / 512) ** 2), flush=True)

    if "thin" in options.only:
        print(
            "\n| link | state of a rank | density | step | exchange | copies | all of the link | a copy takes | "
            "generations |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for rate in options.rates.split(","):
            for strategy in options.strategies.split(","):
                for replicas in map(int, options.replicas.split(",")):
                    print(thin(float(rate), strategy, replicas, options), flush=True)


if __name__ == "__main__":
    main()
