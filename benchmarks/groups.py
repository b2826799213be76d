"""Strategy groups: what its scheduler takes, and what groups give four replicas of which one is three times slower.

    python benchmarks/groups.py scheduler [--signals 10000] [--seconds 10]
    python benchmarks/groups.py replicas [--slower 3] [--rounds 8] [--rules all scheduled] [--seeds 1 2 3] [--json FILE]
    python benchmarks/groups.py pipelines [--cases bubble cut slower equal] [--rounds 8] [--rules all scheduled]
        [--seeds 1 2 3] [--layer-s 0.003] [--json FILE]
    python benchmarks/groups.py virtual [--slower 3]
    python benchmarks/groups.py lost [--kills 3] [--cold]

scheduler: 100 runs of ten replicas, each message as JSON in and out as the relay has it. Time is the processor time of
this process, and where nothing is due it skips to what is next: so it is that of a core of its own, whatever else
runs. An answer's delay is counted from when it was possible: the window's end, or the signal that completed a group.

replicas: a real local cluster of four agents. Updates wait in place of computing (scripts/groups_train.py), so that
four replicas on two cores are as independent as devices are. By each rule the same rounds of the same samples: rounds
a second after the first, and when the held-out loss of the model at a round's end was first as low as all rules reach.
Of several seeds (weights, order of samples) median, least and most.

pipelines: the same with stages (scripts/pipelines_train.py). bubble: one pipeline of equal stages, the share of the
time that they wait for each other, and the formula. cut: three devices 1 : 0.6 : 0.3, cut by planner stages
and evenly. slower, equal: four pipelines of two stages, the last one --slower times slower or none, by each rule, as
replicas. What workers compute besides waiting is the more, the shorter --layer-s is: too much, where bubbles are far
above those of `bubble`.

virtual: the cases of pipelines and replicas in virtual time (grouping/virtual.py): the real ledger, scheduler and order
of passes, where passes take time and all else takes none. For a busy machine, and for what is lost to it on any.

lost: SIGKILL of the last worker of three replicas, and of two pipelines of two stages; each kill is of a new job. By
the controller's events: how long the others stood still (without the first round of the next view), and seconds from
the signal until all workers train again. The kill comes once a process waits on each agent for launches
(docs/operations.md); with --cold in the job's first seconds, before there is any.
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
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(HERE / "scripts"), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

from cluster import Cluster
from fork_servers import wait_for_fork_servers
from grouping.standing import GOALS, Standing, Trained
from grouping.virtual import Pace, Trial
from lab.machine import processor
from pipelines_train import held_out_loss

from atoll.strategies.declaration import as_json, read
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.scheduler import GroupScheduler
from atoll.strategies.groups.settings import Groups
from atoll.v1 import jobs_pb2 as pb

RUNS, REPLICAS = 100, 10
SIGNAL = as_json(GroupsMessage(rank=77, workers=REPLICAS, signal=88).said()).replace("77", "%d").replace("88", "%d")
RULES = ("all", "pairs", "static", "scheduled")


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


def done(cluster: Cluster, job: str) -> None:
    if cluster.wait_for_end(job, deadline_s=1800).phase != pb.PHASE_DONE:
        raise SystemExit(cluster.story(job))


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replicas(slower: float, rounds: int, rules: Sequence[str], seeds: Iterable[int]) -> Iterator[Trained]:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0] * 4)
        for seed, rule in itertools.product(seeds, rules):
            out = Path(folder) / f"{rule}-{seed}"
            out.mkdir()
            job = cluster.submit(
                str(HERE / "scripts" / "groups_train.py"), str(out), str(slower), str(rounds), workers=(4, 4),
                strategy="groups", strategy_settings=as_json({"grouping": rule}), seed=seed,
            )  # fmt: skip
            done(cluster, job)
            curve = tuple((line["s"], line["loss"]) for line in rows(out / "rounds.jsonl"))
            yield Trained("slower", rule, seed, 0.0, curve)


class Pipelines:
    """Jobs of pipelines, on one cluster."""

    def __init__(self, cluster: Cluster, folder: Path, layer_s: float) -> None:
        self._cluster, self._folder, self._layer_s = cluster, folder, layer_s

    def train(  # the script's arguments, in its order
        self, name: str, pipelines: int, rule: str, speeds: str, slower: float, rounds: int, batches: int, micros: int,
        split_at: str = "", seed: int = 0,
    ) -> list[list[dict[str, float]]]:  # fmt: skip
        """By rank, what its rounds were. With `split_at` FOLDER/NAME/weights has the model as each of them ended."""
        out = self._folder / name
        (out / "weights" if split_at else out).mkdir(parents=True)
        stages = len(speeds.split(","))
        workers = pipelines * stages
        job = self._cluster.submit(
            str(HERE / "scripts" / "pipelines_train.py"), str(out), str(self._layer_s), speeds, str(slower),
            str(rounds), str(batches), str(micros), *([split_at] if split_at else []), workers=(workers, workers),
            strategy="groups", strategy_settings=as_json({"stages": stages, "grouping": rule}), seed=seed,
        )  # fmt: skip
        done(self._cluster, job)
        return [rows(out / f"rounds-{rank}.jsonl") for rank in range(workers)]

    def bubbles(self) -> Iterator[str]:
        for stages, split_at, micros in ((2, "6", 4), (2, "6", 8), (3, "4,8", 8)):
            told = self.train(f"bubble-{stages}-{micros}", 1, "all", ",".join("1" * stages), 1, 3, 5, micros, split_at)
            formula = (stages - 1) / (micros + stages - 1)
            yield f"{stages} stages, {micros} micro-batches: bubbles {bubbles_of(told):.1%}, formula {formula:.1%}"

    def cut(self) -> str:
        planned, even = (
            self.train(f"cut-{split_at}", 1, "all", "1,0.6,0.3", 1, 3, 4, 8, split_at) for split_at in ("", "4,8")
        )
        times = (even[0][-1]["s"] - even[0][0]["s"]) / (planned[0][-1]["s"] - planned[0][0]["s"])
        return f"1 : 0.6 : 0.3, by planner stages against an even cut: {times:.2f}x"

    def of_four(self, case: str, slower: float, rounds: int, rule: str, seed: int) -> Trained:
        """Four pipelines of two stages, the last one so many times slower."""
        name = f"{case}-{rule}-{seed}"
        told = self.train(name, 4, rule, "1,1", slower, rounds, 12, 8, "6", seed)
        weights = self._folder / name / "weights"
        curve = tuple((line["s"], held_out_loss(weights, number)) for number, line in enumerate(told[0]))
        return Trained(case, rule, seed, bubbles_of(told), curve)


def bubbles_of(told: list[list[dict[str, float]]]) -> float:
    return statistics.fmean(lines[-1]["bubble"] for lines in told)


def pipelines(options: argparse.Namespace) -> Iterator[Trained]:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.local([1.0] * 8)
        given = Pipelines(cluster, Path(folder), options.layer_s)
        for line in [
            *(given.bubbles() if "bubble" in options.cases else []),
            *([given.cut()] if "cut" in options.cases else []),
        ]:
            print(line, flush=True)
        for case, factor in (("slower", options.slower), ("equal", 1.0)):
            for seed, rule in itertools.product(options.seeds, options.rules if case in options.cases else ()):
                yield given.of_four(case, factor, options.rounds, rule, seed)


def show(trained: Iterable[Trained], to: Path | None) -> None:
    """Each job as it ends, then a table of each case. to: where all is kept as JSON, also of those so far."""
    kept: list[Trained] = []
    for one in trained:
        kept.append(one)
        print(f"{one.case}, {one.rule}, seed {one.seed}: {one.rounds_per_s:.3f} rounds/s, load {load()}", flush=True)
        if to is not None:
            to.write_text(json.dumps({"machine": machine(), "trained": [asdict(each) for each in kept]}, indent=1))
    for _, group in itertools.groupby(kept, lambda one: one.case):
        standing = Standing(list(group))
        print("\n".join([f"\n{standing.case}:", *standing.table(), *standing.goals()]))


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def machine() -> str:
    return f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, load {load()}"


def virtual(slower: float) -> None:
    for stages, micros, case, factor in ((1, 1, "slower", slower), (2, 8, "slower", slower), (2, 8, "equal", 1.0)):
        paces = [Pace((0.018 * each,) * stages) for each in (1.0, 1.0, 1.0, factor)]
        found: dict[str, float] = {}
        for rule in RULES:
            trial = Trial(Groups.model_validate({"stages": stages, "grouping": rule}), paces, micros, 48)
            trained = trial.train(25)
            idle = sum(one.idle_s for one in trained) / sum(one.passes_s for one in trained)
            found[rule] = trial.rounds_per_s
            times = found[rule] / found["all"]
            print(f"{stages} stages, {case}, {rule}: {times:.2f} times the rounds of `all`, bubbles {idle:.1%}")
        for rule, goal in GOALS[case]:
            print(f"  `scheduled`: {found['scheduled'] / found[rule]:.2f} times `{rule}`, goal {goal:g}")


def lost(stages: int, kills: int, *, cold: bool) -> None:
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
            if not cold:
                wait_for_fork_servers(Path(folder), workers)
            killed_s = time.time()
            os.kill(pids[workers - 1], signal.SIGKILL)

            def stood_still(job: str = job) -> float | None:
                """Return the pause of the first loss, without the first round."""
                lost = (event for event in cluster.client.events(job) if event.parts and event.lost)
                if (event := next(lost, None)) is None:
                    return None
                return sum(part.seconds for part in event.parts if part.name != "first step")

            cluster.wait_for(job, "the next view", lambda _: stood_still() is not None, deadline_s=60)
            pause_s = stood_still()
            assert pause_s is not None

            def back(seen: pb.Job, job: str = job) -> bool:
                joined = any(one.parts and one.joined for one in cluster.client.events(job))
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
    parser.add_argument("what", choices=["scheduler", "replicas", "pipelines", "virtual", "lost"])
    parser.add_argument("--kills", type=int, default=3, help="of each: replicas, and pipelines")
    parser.add_argument("--cold", action="store_true", help="of lost: kill before any process waits for a launch")
    parser.add_argument("--signals", type=float, default=10_000, help="a second, of all runs")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--slower", type=float, default=3, help="how many times as long the last replica takes")
    parser.add_argument("--rounds", type=int, default=8, help="of replicas, and of the cases slower and equal")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="each is trained by each rule")
    parser.add_argument("--layer-s", type=float, default=0.003, help="of a layer's forward pass in pipelines")
    parser.add_argument("--json", type=Path, help="write what was trained here")
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=RULES, help="`all` is what others are held against"
    )
    cases = ("bubble", "cut", "slower", "equal")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, help="of pipelines")
    options = parser.parse_args()
    options.rules = list(dict.fromkeys(["all", *options.rules]))
    print(machine(), flush=True)
    if options.what == "scheduler":
        scheduler(options.signals, options.seconds)
    elif options.what == "pipelines":
        show(pipelines(options), options.json)
    elif options.what == "virtual":
        virtual(options.slower)
    elif options.what == "lost":
        for stages in (1, 2):
            lost(stages, options.kills, cold=options.cold)
    else:
        show(replicas(options.slower, options.rounds, options.rules, options.seeds), options.json)


if __name__ == "__main__":
    main()
