"""Trains a pipeline of two stages with six volunteers in real processes: kills, a liar, all volunteers gone at once.

    python benchmarks/volunteer_processes.py [--seconds 60] [--parts calm,kills,liar,gone]

Two servers hold a stage each; volunteers dial them, three each. The model is tiny, and a sample takes a device of power
1 pretended 4 ms in each direction, so that processes and not cores are what there is too few of; servers and volunteers
have power 1. `calm`: nobody is killed. `kills`: every 5 s one volunteer gets SIGKILL and another is started in its
place. `liar`: one of the six has random numbers of the right size after 20 honest answers. `gone`: in the middle all
six are killed at once. `drill`: a short run of all these. Told are steps a second, the losses against those of the
servers alone (the same batches in the same order) and of other seeds, and what the ledgers say of each step."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from held_ports import free_port
from volunteering.course import STAGES, Course
from volunteering.stage_server import serve
from volunteering.volunteer import volunteer

VOLUNTEERS: Final = 6
KILL_EVERY_S: Final = 5.0
RUN_S: Final = 200.0  # a run that is not over by then never will be
HONEST: Final = 20  # answers of a liar before its first lie
STEPS_A_SECOND: Final = 3
TAIL: Final = 20  # steps whose mean loss is compared
processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Told:
    """Of a run: the steps that the last stage told, what the first one counted in each, events of both."""

    steps: list[dict[str, Any]]
    first: list[dict[str, Any]]
    events: list[dict[str, Any]]
    refused: dict[str, int]

    @property
    def steps_per_s(self) -> float:
        return (len(self.steps) - 1) / float(self.steps[-1]["at_s"] - self.steps[0]["at_s"])

    @property
    def loss(self) -> float:
        return statistics.fmean(float(one["loss"]) for one in self.steps[-TAIL:])

    def exact(self, course: Course) -> bool:
        """Whether each step had each of its samples once, in both stages."""
        whole = course.micros * course.samples
        numbers = list(range(course.steps))
        return all(
            [one["step"] for one in told] == numbers and {one["samples"] for one in told} == {whole}
            for told in (self.steps, self.first)
        )


class Cluster:
    """Servers and volunteers of one run."""

    def __init__(self, course: Course, folder: Path) -> None:
        self.course, self.folder = course, folder
        self._ports = (free_port(), free_port(), free_port())
        self.servers = [self._start(serve, course, stage, self._ports, folder) for stage in range(STAGES)]
        self.volunteers: list[ForkServerProcess] = []
        self._started = 0

    def help(self, *, lies_after: int | None = None) -> None:
        """One more volunteer, for each stage in turn. lies_after: it lies after so many honest answers."""
        stage = self._started % STAGES
        name = f"{'volunteer' if lies_after is None else 'liar'}-{self._started}"
        self._started += 1
        self.volunteers.append(
            self._start(volunteer, self.course, stage, self._ports[stage], name, 1.0, lies_after=lies_after)
        )

    def told(self) -> Told:
        last, first = (
            [json.loads(line) for line in (self.folder / f"stage-{stage}.jsonl").read_text().splitlines()]
            for stage in (1, 0)
        )
        ends = [one for one in (*last, *first) if one["kind"] == "end"]
        names = {name for one in ends for name in one["refused"]}
        return Told(
            [one for one in last if one["kind"] == "step"],
            [one for one in first if one["kind"] == "step"],
            [one for one in (*last, *first) if one["kind"] == "event"],
            {name: sum(one["refused"].get(name, 0) for one in ends) for name in sorted(names)},
        )

    def steps(self) -> int:
        path = self.folder / "stage-1.jsonl"
        return sum('"kind": "step"' in line for line in path.read_text().splitlines()) if path.exists() else 0

    def written(self) -> str:
        return "".join(one.read_text() for one in self.folder.glob("*.jsonl"))

    def wait(self, reached: Callable[[], bool]) -> None:
        end_s = time.monotonic() + RUN_S
        while not reached():
            if self.over(0.05) or time.monotonic() > end_s:
                raise SystemExit(f"{self.steps()} of {self.course.steps} steps, and not what was waited for")

    def over(self, wait_s: float) -> bool:
        self.servers[1].join(wait_s)
        return not self.servers[1].is_alive()

    def stop(self) -> None:
        for one in (*self.servers, *self.volunteers):
            one.kill()
        for one in (*self.servers, *self.volunteers):
            one.join(10)

    def _start(self, target: Any, *args: Any, **options: Any) -> ForkServerProcess:
        started = processes.Process(target=target, args=args, kwargs=options, daemon=True)
        started.start()
        return started


@contextmanager
def cluster_of(course: Course, volunteers: int, liars: int = 0) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(course, Path(folder))
        try:
            for number in range(volunteers):
                cluster.help(lies_after=HONEST if number < liars else None)
            yield cluster
        finally:
            cluster.stop()


def undisturbed(course: Course, volunteers: int = VOLUNTEERS, liars: int = 0) -> Told:
    with cluster_of(course, volunteers, liars) as cluster:
        if not cluster.over(RUN_S):
            raise SystemExit(f"no end after {RUN_S:.0f} s: {cluster.steps()} of {course.steps} steps")
        return cluster.told()


def with_kills(course: Course) -> tuple[Told, int]:
    """The run, and how many were killed."""
    with cluster_of(course, VOLUNTEERS) as cluster:
        killed, end_s = 0, time.monotonic() + RUN_S
        while not cluster.over(KILL_EVERY_S):
            if time.monotonic() > end_s:
                raise SystemExit(f"no end after {RUN_S:.0f} s: {cluster.steps()} of {course.steps} steps")
            cluster.volunteers.pop(0).kill()
            cluster.help()
            killed += 1
        return cluster.told(), killed


def all_gone(course: Course) -> tuple[Told, float, float]:
    """The run; steps a second before all volunteers were killed at once, and after."""
    with cluster_of(course, VOLUNTEERS) as cluster:
        cluster.wait(lambda: cluster.steps() >= course.steps // 2)
        for one in cluster.volunteers:
            one.kill()
        at_s = time.time()
        if not cluster.over(RUN_S):
            raise SystemExit(f"no end after {RUN_S:.0f} s: {cluster.steps()} of {course.steps} steps")
        told = cluster.told()
        before = [float(one["at_s"]) for one in told.steps if one["at_s"] < at_s]
        after = [float(one["at_s"]) for one in told.steps if one["at_s"] >= at_s]
        return told, (len(before) - 1) / (before[-1] - before[0]), (len(after) - 1) / (after[-1] - after[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a part, about")
    parser.add_argument("--parts", default="calm,kills,liar,gone")
    asked = parser.parse_args()
    processes.set_forkserver_preload(["volunteering.stage_server", "volunteering.volunteer"])
    course = Course(steps=max(2 * TAIL, math.ceil(asked.seconds * STEPS_A_SECOND)), seed=1)
    quick = replace(course, sample_s=0.0)
    alone = undisturbed(quick, 0)
    if "calm" in asked.parts:
        seeds = [undisturbed(replace(quick, seed=seed), 0).loss for seed in (2, 3, 4)]
        print(f"alone: loss of the last {TAIL} of {course.steps} steps {alone.loss:.4f}", end="; ")
        print(f"of other seeds {', '.join(f'{one:.4f}' for one in seeds)}: deviation {statistics.stdev(seeds):.4f}")
    for part in asked.parts.split(","):
        PARTS[part](course, alone)


def calm(course: Course, alone: Told) -> None:
    tell("calm", course, undisturbed(course), alone)


def kills(course: Course, alone: Told) -> None:
    found, killed = with_kills(course)
    tell(f"kills, {killed} of them", course, found, alone)


def liar(course: Course, alone: Told) -> None:
    found = undisturbed(course, liars=1)
    tell("liar", course, found, alone)
    print("\n".join(f"  {one['what']}" for one in found.events if "shut out" in one["what"]))


def gone(course: Course, alone: Told) -> None:
    """Of a third of the steps."""
    short = replace(course, steps=course.steps // 3)
    found, before, after = all_gone(short)
    tell("gone", short, found, alone)
    slow = undisturbed(replace(course, steps=course.steps // 6), 0)
    print(f"  {before:.2f} steps a second before, {after:.2f} after; servers alone {slow.steps_per_s:.2f}")


def drill(course: Course, alone: Told) -> None:
    """A liar from its first answer on, a kill, then all killed: what the tests look at."""
    hasty = replace(course, sample_s=0.001)
    with cluster_of(hasty, 0) as cluster:
        for lies_after in (0, None, None):
            cluster.help(lies_after=lies_after)
        cluster.wait(lambda: "shut out" in cluster.written() and cluster.steps() > 0)
        cluster.volunteers[1].kill()
        cluster.help()
        there = cluster.steps()
        cluster.wait(lambda: cluster.steps() >= there + TAIL // 4)
        for one in cluster.volunteers:
            one.kill()
        if not cluster.over(RUN_S):
            raise SystemExit(f"no end after {RUN_S:.0f} s: {cluster.steps()} of {course.steps} steps")
        found = cluster.told()
    tell("drill", hasty, found, alone)
    print("\n".join(f"  {one['what']}" for one in found.events if "shut out" in one["what"]))


PARTS: Final = {"drill": drill, "calm": calm, "kills": kills, "liar": liar, "gone": gone}


def tell(name: str, course: Course, found: Told, alone: Told) -> None:
    losses = [(float(one["loss"]), float(same["loss"])) for one, same in zip(found.steps, alone.steps, strict=False)]
    apart = max(abs(one - same) for one, same in losses)
    again = sum(one["attempt"] for one in found.steps)
    print(
        f"{name}: {found.steps_per_s:.2f} steps a second; loss of the last {TAIL} {found.loss:.4f}, of any step "
        f"at most {apart:.2g} from alone; every sample once {found.exact(course)}; steps begun again {again}; refused "
        f"{found.refused}",
        flush=True,
    )


if __name__ == "__main__":
    main()
