"""Strategy groups: what its scheduler takes, and what groups give four replicas of which one is three times slower.

    python benchmarks/groups.py scheduler [--signals 10000] [--seconds 10]
    python benchmarks/groups.py replicas [--slower 3] [--rounds 8] [--rules all scheduled]
    python benchmarks/groups.py pipelines [--cases bubble cut slower equal] [--rules all scheduled]
    python benchmarks/groups.py lost [--kills 3]

scheduler: 100 runs of ten replicas, each message as JSON in and out as the relay has it. Time is the processor time of
this process, and where nothing is due it skips to what is next: so it is that of a core of its own, whatever else
runs. An answer's delay is counted from when it was possible: the window's end, or the signal that completed a group.

replicas: a real local cluster of four agents. Updates wait in place of computing (scripts/groups_train.py), so that
four replicas on two cores are as independent as devices are. By each rule the same rounds of the same samples: rounds
a second, and when the held-out loss of the model at a round's end was first as low as all rules reach.

pipelines: the same with stages (scripts/pipelines_train.py). bubble: one pipeline of equal stages, the share of the
time that they wait for each other, and the formula. cut: three devices 1 : 0.6 : 0.3, cut by planner stages
and evenly. slower, equal: four pipelines of two stages, the last one --slower times slower or none, by each rule.

lost: SIGKILL of the last worker of three replicas, and of two pipelines of two stages; each kill is of a new job. By
the controller's events: how long the others stood still (without the first round of the next view), and seconds from
the signal until all workers train again.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e")]

from cluster import Cluster
from lab.machine import processor

from atoll.strategies.declaration import as_json, read
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.scheduler import GroupScheduler
from atoll.strategies.groups.settings import Groups
from atoll.v1 import jobs_pb2 as pb

RUNS, REPLICAS = 100, 10
SIGNAL = as_json(GroupsMessage(rank=77, workers=REPLICAS, signal=88).said()).replace("77", "%d").replace("88", "%d")
RULES = ("all", "pairs", "static", "scheduled")
WENT_ON = re.compile(  # what a view took but for its first round
    r"from step \d+: ([\d.]+) noticed, ([\d.]+) aborted, ([\d.]+) told, ([\d.]+) formed, ([\d.]+) agreed, .*lost"
)


class Clock:
    """Of a core that works as this process did, and sleeps where there is nothing to do."""

    def __init__(self) -> None:
        self._begun_s, self.slept_s = time.process_time(), 0.0

    @property
    def worked_s(self) -> float:
        return time.process_time() - self._begun_s

    def now_s(self) -> float:
        return self.worked_s + self.slept_s

    def sleep_until(self, at_s: float) -> None:
        self.slept_s += max(at_s - self.now_s(), 0.0)


class Load:
    """Replicas that are ready an iteration after they were grouped, and the schedulers that they tell."""

    def __init__(self, signals_per_s: float) -> None:
        self._draw = random.Random(1)
        self._iteration_s = 0.78 * RUNS * REPLICAS / signals_per_s  # the rest they wait for each other
        self._schedulers = [GroupScheduler(Groups()) for _ in range(RUNS)]
        self._signals = [[0] * REPLICAS for _ in range(RUNS)]
        self.clock = Clock()
        self._ready: list[tuple[float, int, int]] = []
        begins_s = [self._draw.uniform(0, self._iteration_s) for _ in range(RUNS)]
        for run, replica in itertools.product(range(RUNS), range(REPLICAS)):
            self._goes_on(run, replica, begins_s[run])
        self._dues: list[tuple[float, int]] = []  # windows' ends, some of which are over
        self.delays_s: list[float] = []
        self.heard = 0

    def turn(self) -> None:
        """What is due next."""
        while self._dues and self._dues[0][0] != self._schedulers[self._dues[0][1]].due_s:
            heapq.heappop(self._dues)  # that window ended sooner
        due_s, run = self._dues[0] if self._dues else (math.inf, 0)
        at_s, of, replica = self._ready[0] if self._ready else (math.inf, 0, 0)
        self.clock.sleep_until(min(due_s, at_s))
        if due_s < at_s:
            self._take(run, self._schedulers[run].passed(self.clock.now_s()), due_s)
            return
        heapq.heappop(self._ready)
        self._signals[of][replica] += 1
        told = read(GroupsMessage, SIGNAL % (replica, self._signals[of][replica]), "signal")
        self._take(of, self._schedulers[of].heard(replica, told, self.clock.now_s()), at_s)
        self.heard += 1

    def _take(self, run: int, answers: Iterable[tuple[int, GroupsMessage]], possible_s: float) -> None:
        for replica, answer in answers:
            as_json(answer.said())
            now_s = self.clock.now_s()
            self.delays_s.append(now_s - possible_s)
            self._goes_on(run, replica, now_s)
        self._schedulers[run].take_notices(possible_s)
        if (due_s := self._schedulers[run].due_s) is not None:
            heapq.heappush(self._dues, (due_s, run))

    def _goes_on(self, run: int, replica: int, now_s: float) -> None:
        spread = 2.0 if replica == 0 else self._draw.uniform(0.9, 1.1)
        heapq.heappush(self._ready, (now_s + spread * self._iteration_s, run, replica))


def scheduler(signals_per_s: float, seconds: float) -> None:
    load = Load(signals_per_s)
    while load.clock.now_s() < seconds:
        load.turn()
    wall_s, cpu_s = load.clock.now_s(), load.clock.worked_s
    delays_ms = sorted(1e3 * each for each in load.delays_s)
    print(
        f"{load.heard / wall_s:.0f} signals/s, {cpu_s / wall_s:.0%} of a core ({1e6 * cpu_s / load.heard:.0f} us each)"
    )
    for share in (0.5, 0.99, 0.999):
        print(f"p{100 * share:g} of an answer's delay: {delays_ms[int(share * (len(delays_ms) - 1))]:.2f} ms")


def trained(cluster: Cluster, rule: str, slower: float, rounds: int, folder: Path) -> list[tuple[float, float]]:
    """(seconds since training began, held-out loss) at each round's end."""
    job = cluster.submit(
        str(HERE / "scripts" / "groups_train.py"), str(folder), str(slower), str(rounds), workers=(4, 4),
        strategy="groups", strategy_settings=as_json({"grouping": rule}),
    )  # fmt: skip
    ended = cluster.wait_for_end(job, deadline_s=170)
    if ended.phase != pb.PHASE_DONE:
        raise SystemExit(cluster.story(job))
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [(line["s"], line["loss"]) for line in lines]


def replicas(slower: float, rounds: int, rules: Sequence[str]) -> None:
    curves: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0] * 4)
        for rule in rules:
            (Path(folder) / rule).mkdir()
            curves[rule] = trained(cluster, rule, slower, rounds, Path(folder) / rule)
    target = max(min(loss for _, loss in curve) for curve in curves.values())
    print(f"| grouping | rounds/s | against `all` | held-out loss {target:.3f} after | against `all` | last loss |")
    print("|---|---|---|---|---|---|")
    reached = {rule: next(at_s for at_s, loss in curve if loss <= target) for rule, curve in curves.items()}
    for rule, curve in curves.items():
        rate, alls = rounds / curve[-1][0], rounds / curves["all"][-1][0]
        sooner = reached["all"] / reached[rule]
        times = f"{rate:.2f} | {rate / alls:.2f}x | {reached[rule]:.1f} s | {sooner:.2f}x"
        print(f"| `{rule}` | {times} | {curve[-1][1]:.3f} |")


def pipelines(cases: Sequence[str], slower: float, rules: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0] * 8)

        def run(name: str, pipelines: int, rule: str, *arguments: str) -> tuple[float, float, float]:
            """Rounds a second of those after the first, the mean bubble share, the last loss."""
            out = Path(folder) / name
            out.mkdir()
            stages = len(arguments[1].split(","))
            workers = pipelines * stages
            job = cluster.submit(
                str(HERE / "scripts" / "pipelines_train.py"), str(out), *arguments, workers=(workers, workers),
                strategy="groups", strategy_settings=as_json({"stages": stages, "grouping": rule}),
            )  # fmt: skip
            if cluster.wait_for_end(job, deadline_s=170).phase != pb.PHASE_DONE:
                raise SystemExit(cluster.story(job))
            told = [
                [json.loads(line) for line in (out / f"rounds-{rank}.jsonl").read_text().splitlines()]
                for rank in range(workers)
            ]
            bubble = sum(lines[-1]["bubble"] for lines in told) / workers
            first, last = told[0][0], told[0][-1]
            return (len(told[0]) - 1) / (last["s"] - first["s"]), bubble, last["loss"]

        if "bubble" in cases:
            for stages, split_at, micro_batches in ((2, "6", 4), (2, "6", 8), (3, "4,8", 8)):
                speeds = ",".join(["1"] * stages)
                name = f"bubble-{stages}-{micro_batches}"
                _, bubble, _ = run(name, 1, "all", "0.003", speeds, "1", "3", "5", str(micro_batches), split_at)
                formula = (stages - 1) / (micro_batches + stages - 1)
                print(f"{stages} stages, {micro_batches} micro-batches: bubbles {bubble:.1%}, formula {formula:.1%}")
        if "cut" in cases:
            planned, _, _ = run("planned", 1, "all", "0.003", "1,0.6,0.3", "1", "3", "4", "8")
            even, _, _ = run("even", 1, "all", "0.003", "1,0.6,0.3", "1", "3", "4", "8", "4,8")
            print(f"1 : 0.6 : 0.3, by planner stages against an even cut: {planned / even:.2f}x")
        for case, factor in (("slower", slower), ("equal", 1.0)):
            if case in cases:
                print(f"4 pipelines x 2 stages, the last {factor:g}x slower")
                for rule in rules:
                    rate, bubble, loss = run(
                        f"{case}-{rule}", 4, rule, "0.003", "1,1", str(factor), "3", "12", "8", "6"
                    )
                    print(f"| `{rule}` | {rate:.3f} rounds/s | bubbles {bubble:.0%} | last loss {loss:.3f} |")


def lost(stages: int, kills: int) -> None:
    workers, took = {1: 3, 2: 4}[stages], []
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0] * workers)
        for number in range(kills):
            out = Path(folder) / f"out-{number}"
            out.mkdir()
            split_at = ("6",) if stages == 2 else ()
            job = cluster.submit(
                str(HERE / "scripts" / "pipelines_train.py"), str(out), "0.001", ",".join(["1"] * stages), "1", "2000",
                "6", "4", *split_at, workers=(stages, workers), strategy="groups",
                strategy_settings=as_json({"stages": stages}),
            )  # fmt: skip
            pids = {one.rank: one.status.pid for one in cluster.wait_for_step(job, 3, deadline_s=60).workers}
            killed_s = time.time()
            os.kill(pids[workers - 1], signal.SIGKILL)

            def stood_still(job: str = job) -> float | None:
                told = [match for event in cluster.client.events(job) if (match := WENT_ON.search(event.text))]
                return sum(float(part) for part in told[0].groups()) if told else None

            cluster.wait_for(job, "the next view", lambda _: stood_still() is not None, deadline_s=60)
            pause_s = stood_still()
            assert pause_s is not None

            def back(seen: pb.Job, job: str = job) -> bool:
                joined = any("; rank" in one.text and "joined" in one.text for one in cluster.client.events(job))
                return joined or (seen.run > 1 and len(seen.workers) == workers and seen.progress.step > 3)

            cluster.wait_for(job, "all workers", back, deadline_s=120)
            took.append((pause_s, time.time() - killed_s))
            cluster.client.cancel(job)
            cluster.wait_for_end(job)
    pauses, backs = zip(*took, strict=True)
    print(
        f"{stages} stages, {kills} kills: others stood still {statistics.median(pauses):.2f} s, "
        f"most {max(pauses):.2f}; all train again after {statistics.median(backs):.1f} s, most {max(backs):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["scheduler", "replicas", "pipelines", "lost"])
    parser.add_argument("--kills", type=int, default=3, help="of each: replicas, and pipelines")
    parser.add_argument("--signals", type=float, default=10_000, help="a second, of all runs")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--slower", type=float, default=3, help="how many times as long the last replica takes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=RULES, help="`all` is what others are held against"
    )
    cases = ("bubble", "cut", "slower", "equal")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, help="of pipelines")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.what == "scheduler":
        scheduler(options.signals, options.seconds)
    elif options.what == "pipelines":
        pipelines(options.cases, options.slower, options.rules)
    elif options.what == "lost":
        for stages in (1, 2):
            lost(stages, options.kills)
    else:
        replicas(options.slower, options.rounds, options.rules)


if __name__ == "__main__":
    main()
