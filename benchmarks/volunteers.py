"""Runs a job of strategy volunteer on a real cluster: two agents that stay and six volunteers, killed all the time.

    python benchmarks/volunteers.py [--seconds 40] [--kill-every 5] [--stages 2] [--server-kills 6]
        [--cold] [--parts alone,calm,kills,servers,controller,gone]

The job is that of the tests (tests/e2e/scripts/helped.py): tiny, and a sample pretends to take 20 ms wherever it is
computed, so that cores count little. Parts, one after the other in one run of the job: `alone` the two ranks by
themselves; `calm` six volunteers help; `kills` every few seconds the worker of one gets SIGKILL, and its agent starts
another; `servers` the worker of each rank in turn gets SIGKILL (with --cold at once, else once a process waits for
launches on each device), and told is how long it takes until another step is done; `controller` the controller gets
SIGKILL, and told is the longest time between two steps until it is back; `gone` all volunteers' agents get SIGKILL at
once, and their workers with them. With stages the two ranks hold half of the model each. Told are steps a second of
each part, how long a volunteer takes from `atoll agent` to its first task, and by how much the loss of any step differs
from that of the same script by itself."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / "benchmarks"),
    str(ROOT / "tests"),
    str(ROOT / "tests" / "e2e"),
    str(ROOT / "tests" / "runtime"),
]

import psutil
from cluster import SCRIPTS, Cluster, kill, wait_until
from fork_servers import wait_for_fork_servers

from atoll.v1 import common_pb2 as common

RANKS, VOLUNTEERS = 2, 6
SCRIPT: Final = ("--batch-size=128", "--micro-batches=8", "--epochs=100000")
SETTLED_S: Final = 3.0


class Run:
    """The job on its cluster."""

    def __init__(self, cluster: Cluster, out: Path, stages: int) -> None:
        self._cluster, self._out = cluster, out
        cluster.controller(etcd=cluster.etcd())
        for number in range(RANKS):
            cluster.agent(f"agent-{number}")
        cluster.wait_for_nodes(RANKS)
        self._job = cluster.submit(
            "helped.py", f"--out={out}", "--sample-s=0.02", *SCRIPT, workers=(RANKS, RANKS), strategy="volunteer",
            strategy_settings=json.dumps({"stages": stages}), checkpoint_every=1 if stages > 1 else 10,
        )  # fmt: skip
        cluster.wait_for_step(self._job, 2)

    def losses(self) -> dict[int, float]:
        """As each step was trained first: a run that goes on at an epoch's end shows its last batch again, without
        effect. One that a loss broke off is shown with 0."""
        found: dict[int, float] = {}
        for path in self._out.glob("rank-*.jsonl"):  # all ranks have the same
            lines = path.read_text().splitlines()[:-1]  # the last may be half
            found |= {int(one["step"]): float(one["loss"]) for one in map(json.loads, reversed(lines)) if one["loss"]}
        return found

    def metric(self, name: str) -> float:
        return self._cluster.job(self._job).progress.strategy_metrics.get(name, 0.0)

    def join(self, name: str) -> None:
        self._cluster.agent(name, 1.0, "--volunteer")

    def processor_s(self, name: str) -> float:
        """Of an agent and its worker so far."""
        agent = psutil.Process(self._cluster.processes[name].pid)
        return sum(sum(one.cpu_times()[:2]) for one in (agent, *agent.children(recursive=True)))

    def joined(self, count: int) -> None:
        wait_until(f"{count} volunteers", lambda: self.metric("volunteers") >= count, 60)

    def steps_per_s(self, seconds: float, every_s: float = 0.0) -> float:
        """Over so long a time. every_s: one volunteer's worker is killed so often; 0: none."""
        begun_s, before, turn = time.monotonic(), len(self.losses()), 0
        while (left_s := begun_s + seconds - time.monotonic()) > 0:
            time.sleep(min(left_s, every_s or left_s))
            if every_s:
                turn = self._kill(turn)
        return (len(self.losses()) - before) / (time.monotonic() - begun_s)

    def pauses(self, seconds: float) -> tuple[float, float]:
        """(steps a second, the longest time between two) from now on."""
        begun_s = time.monotonic()
        found = self.steps_per_s(seconds)
        ends = sorted(at_s for at_s in self._ended_s() if at_s >= begun_s)
        return found, max((after - before for before, after in pairwise([begun_s, *ends])), default=seconds)

    def without_controller(self, seconds: float) -> tuple[float, float]:
        """As of `pauses`, from its SIGKILL until it has been there again for as long."""
        self._cluster.kill("controller")
        begun_s = time.monotonic()
        gone = self.pauses(seconds)
        self._cluster.restart("controller")
        self._cluster.wait_for_nodes(RANKS + VOLUNTEERS)
        back = self.pauses(seconds + time.monotonic() - begun_s)
        return gone[0], max(gone[1], back[1])

    def _ended_s(self) -> list[float]:
        """When each step was, by the machine's clock."""
        lines = (self._out / "rank-0.jsonl").read_text().splitlines()[:-1]
        return [float(json.loads(line)["at_s"]) for line in lines]

    def after_a_servers_kill(self, place: int) -> tuple[float, list[str]]:
        """Seconds until another step is done, and what the controller's events say of them. place: of the rank among
        those that are there then."""
        wait_until("all ranks", lambda: len(self._cluster.job(self._job).workers) == RANKS, 120)
        rank = sorted(one.rank for one in self._cluster.job(self._job).workers)[place]
        there, told = max(self.losses()), len(list(self._cluster.client.events(self._job)))
        kill(next(one for one in self._cluster.job(self._job).workers if one.rank == rank).status.pid)
        begun_s, begun_unix_s = time.monotonic(), time.time()
        wait_until("another step", lambda: max(self.losses()) > there + 1, 120)
        took_s = time.monotonic() - begun_s
        events = list(self._cluster.client.events(self._job))[told:]
        return took_s, [f"{one.unix_s - begun_unix_s:5.1f} s: {one.text[:140]}" for one in events]

    def gone(self) -> None:
        for number in range(VOLUNTEERS):
            self._cluster.kill(f"friend-{number}")

    def _kill(self, turn: int) -> int:
        """The worker of the next volunteer that has one."""
        nodes = {node.name: node for node in self._cluster.client.nodes().nodes}
        for number in range(turn, turn + VOLUNTEERS):
            for worker in nodes[f"friend-{number % VOLUNTEERS}"].workers:
                if worker.state == common.WORKER_STATE_RUNNING and worker.uses_atoll:
                    kill(worker.pid)
                    return number + 1
        return turn


def by_itself(out: Path, steps: int) -> dict[int, float]:
    """The losses of the script without controller and volunteers."""
    epochs = steps // 3 + 1  # of 320 samples in batches of 128
    command = [sys.executable, str(SCRIPTS / "helped.py"), f"--out={out}", "--sample-s=0", *SCRIPT[:2]]
    subprocess.run([*command, f"--epochs={epochs}"], check=True, timeout=120, capture_output=True)
    lines = map(json.loads, (out / "rank-0.jsonl").read_text().splitlines())
    return {int(one["step"]): float(one["loss"]) for one in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of `kills`; the other parts take a quarter, 30 at most"
    )
    parser.add_argument("--kill-every", type=float, default=5.0)
    parser.add_argument("--stages", type=int, default=1, choices=(1, RANKS))
    parser.add_argument("--server-kills", type=int, default=6, help="of `servers`, of each rank in turn")
    parser.add_argument("--cold", action="store_true", help="kill them at once, before any process waits for a launch")
    parser.add_argument("--parts", default="alone,calm,kills,servers,controller,gone")
    asked = parser.parse_args()
    quarter_s = min(asked.seconds / 4, 30.0)
    parts = asked.parts.split(",")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        run = Run(cluster, Path(folder) / "out", asked.stages)
        if "alone" in parts:
            print(f"alone: {run.steps_per_s(quarter_s):.2f} steps a second", flush=True)
        joins = []
        for number in range(VOLUNTEERS):
            begun_s = time.monotonic()
            run.join(f"friend-{number}")
            run.joined(number + 1)
            joins.append((time.monotonic() - begun_s, run.processor_s(f"friend-{number}")))
        told = ", ".join(f"{took_s:.1f} ({used_s:.1f})" for took_s, used_s in joins)
        print(f"volunteers helped so many seconds after their start (of processor time): {told}", flush=True)
        time.sleep(SETTLED_S)
        if "calm" in parts:
            calm, share = run.steps_per_s(quarter_s), run.metric("volunteers_share")
            updating = 100 * run.metric("update_share")
            print(f"calm: {calm:.2f}; {100 * share:.0f} % of the samples by volunteers", end="; ")
            print(f"{updating:.1f} % of the time for updates", flush=True)
        if "kills" in parts:
            print(f"kills: {run.steps_per_s(asked.seconds, asked.kill_every):.2f}", end="; ", flush=True)
            print(f"{run.metric('returned'):.0f} tasks back in the pool, {run.metric('late'):.0f} late", flush=True)
        if "servers" in parts:
            for turn in range(asked.server_kills):
                if not asked.cold:
                    wait_for_fork_servers(Path(folder), RANKS)
                took_s, events = run.after_a_servers_kill(turn % RANKS)
                print(f"rank {turn % RANKS} killed: another step after {took_s:.1f} s", *events, sep="\n  ", flush=True)
        if "controller" in parts:
            run.joined(VOLUNTEERS)
            before = run.pauses(quarter_s)
            gone = run.without_controller(quarter_s)
            print(f"controller killed: {gone[0]:.2f} steps a second while it is gone, {before[0]:.2f} before", end="; ")
            print(f"the longest pause between two is {gone[1]:.2f} s, and was {before[1]:.2f} s before", flush=True)
        if "gone" in parts:
            run.gone()
            wait_until("nobody helps", lambda: run.metric("volunteers") == 0, 60)
            print(f"gone: {run.steps_per_s(quarter_s):.2f}", flush=True)
        found = run.losses()
        same = by_itself(Path(folder) / "by-itself", max(found) + 1)
        apart = max(abs(loss / same[step] - 1) for step, loss in found.items())
        print(f"{len(found)} steps, of which none is missing: {sorted(found) == list(range(len(found)))}", end="; ")
        print(f"losses differ by at most {apart:.2g} of their size from the script's by itself")


if __name__ == "__main__":
    main()
