"""Measures what volunteers behind thin links add to a job: at full and at 0.3 of a rank's speed.

    sudo env PATH=$PATH python benchmarks/volunteers_thin.py [--mbit-s 50] [--rtt-ms 50] [--seconds 25] [--width 60000]

One rank and two volunteers, each in a network namespace of its own; the volunteers' links are shaped, not the rank's.
The job is that of the tests (tests/e2e/scripts/helped.py) with 10 * width + 1 weights; a sample pretends to take 20 ms
wherever it is computed. For each form that `thin_links` takes: steps a second of the rank alone, then with the first
volunteer, then with both; told is which part of its power each adds, of what it would add without a network, and what
`atoll status` says of its link."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from lab.network import DEVICE, Network, command, refuse_without_tools
from loop_wan import PORT, cli, cluster

SCRIPT: Final = HERE.parent / "tests" / "e2e" / "scripts" / "helped.py"
SPEEDS: Final = (1.0, 0.3)
SETTLED_S: Final = 8.0


def until(what: str, holds: Callable[[], bool], seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends_s:
            raise SystemExit(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.5)


class Run:
    """A job, and volunteers that join it."""

    def __init__(self, network: Network, folder: Path, form: str, width: int) -> None:
        self._network, self._folder, self._out = network, folder, folder / f"out-{form}"
        jobfile = folder / f"{form}.toml"
        jobfile.write_text(f'strategy = "volunteer"\n[volunteer]\nthin_links = "{form}"\n')
        asked = ["--width", str(width), "--batch-size", "320", "--micro-batches", "4", "--epochs", "100000"]
        said = cli(
            network, "submit", str(SCRIPT), "--workers", "1", "--config", str(jobfile),
            "--checkpoint-every", "0", "--env", f"PYTHONPATH={SCRIPT.parent}", "--json",
            "--", "--out", str(self._out), *asked,
        )  # fmt: skip
        self.job = str(json.loads(said)["job"])
        until("a step", lambda: self.steps() > 1, 90)

    def steps(self) -> int:
        log = self._out / "rank-0.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(cli(self._network, "status", self.job, "--json"))
        return found

    def lines(self) -> list[str]:
        return [one for one in cli(self._network, "status", self.job).splitlines() if one.startswith("volunteer ")]

    def steps_per_s(self, seconds: float) -> float:
        """From one step's end to another's."""
        before = self.steps()
        until("a step", lambda: self.steps() > before, 60)
        first, begun_s = self.steps(), time.monotonic()
        time.sleep(seconds)
        last = self.steps()
        until("a step", lambda: self.steps() > last, 60)
        return (self.steps() - first) / (time.monotonic() - begun_s)

    def join(self, place: int) -> subprocess.Popen[bytes]:
        """A volunteer, which has settled."""
        agent = [sys.executable, "-m", "atoll.cli.main", "agent", "--volunteer", "--name", f"friend-{place}"]
        agent += ["--controller", f"{self._network.address(0)}:{PORT}", "--speed", str(SPEEDS[place - 1])]
        agent += ["--state-dir", str(self._folder / f"friend-{place}-{self.job}"), "--threads", "1"]
        with (self._folder / "log").open("ab") as log:
            started = subprocess.Popen(self._network.inside(place, agent), stdout=log, stderr=log)
        until("it to be measured", lambda: any(f"friend-{place}/0" in one for one in self.lines()), 300)
        time.sleep(SETTLED_S)
        return started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit-s", type=float, default=50.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each part")
    parser.add_argument("--width", type=int, default=60_000)
    parser.add_argument("--forms", default="float32,int8")
    asked = parser.parse_args()
    refuse_without_tools()
    with tempfile.TemporaryDirectory() as name, Network(1 + len(SPEEDS), asked.rtt_ms) as network:
        folder = Path(name)
        network.shape(asked.mbit_s)
        hub = network.namespace(0).rpartition("-")[0] + "-hub"
        for namespace, device in ((network.namespace(0), DEVICE), (hub, "port0")):
            command("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        with cluster(network, folder, agents=1):
            for form in asked.forms.split(","):
                run, joined = Run(network, folder, form, asked.width), []
                before = alone = run.steps_per_s(asked.seconds)
                print(f"thin_links = {form}: alone {alone:.3f} steps a second", flush=True)
                for place, speed in enumerate(SPEEDS, 1):
                    joined.append(run.join(place))
                    now = run.steps_per_s(asked.seconds)
                    adds = (now - before) / (alone * speed)
                    print(
                        f"  with one of speed {speed:g}: {now:.3f}; it adds {100 * adds:.0f} % of its power", flush=True
                    )
                    before = now
                print(*(f"  {one}" for one in run.lines()), sep="\n", flush=True)
                events = cli(network, "events", run.job)
                print(*(f"  {one[:400]}" for one in events.splitlines() if "friend-" in one), sep="\n", flush=True)
                for process in joined:
                    process.terminate()
                for process in joined:
                    process.wait(15)
                cli(network, "cancel", run.job)


if __name__ == "__main__":
    main()
