"""The race: how soon the one model that all islands share reaches a held-out loss, method beside method.

    python benchmarks/race.py [--size XS] [--partition P1] [--steps 1000] [--seeds 1,2,3] [--methods ddp,diloco-25]
        [--rho 4,40,400] [--conditions] [--absent] [--device cuda] [--tune] [--json race.json] [--plot race.png]

Task island-lm: a byte-level GPT on English, German, French and Python text, one domain an island (P1), even parts of
all (P0), mixed by Dirichlet(0.3) (P2), or unequal sizes and speeds (P3). The metric is the time until the consolidated
model's mean held-out loss over the four domains is at the target, which is what DDP reaches on seed 0 after 30 % of its
steps. Time is virtual: a step costs what one island's step was measured to cost here, every exchange's bytes are
counted and sent over a link on which a dense float32 ring takes rho times such a step. Inner optimizer of all: AdamW
(0.9, 0.95), weight decay 0.1, clipping at 1, 5 % warm-up, cosine to a tenth. --tune tries each method's six settings on
seed 0 for half the steps; without it, settings are read from --json of an earlier --tune, or are the first of the six.

--conditions tells the times with a round trip of 50 ms, an uplink of a tenth of the downlink, links that follow
traces/wan.csv, a point for each step, and an island that takes three times as long for a step.

A course on which the best island alone does not end at least 0.3 nats above the best method that exchanges, or on which
DDP is not first per step, is said to be invalid: the exchange does not matter there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from lab import trace
from racing.advice import advised
from racing.clock import Exchange, link_of
from racing.course import Course, Lap, best_setting, run
from racing.field import FIELD
from racing.inner import Replica, Setting
from racing.report import draw, table, times_under
from racing.task import PARTITIONS, SIZES, Batches, everything

TUNING_SEED = 0
TARGET_SHARE = 0.3
NEEDED_GAP = 0.3


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="XS", help="of the byte GPT; or words, cnn")
    parser.add_argument("--partition", choices=PARTITIONS, default="P1")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--absent", action="store_true", help="an island is gone from 40 to 60 %% of the steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that has all islands")
    parser.add_argument("--judge-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--methods", default=",".join(FIELD), help="separated by commas")
    parser.add_argument("--rho", default="4,40,400")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--conditions", action="store_true", help="also on worse links, and beside a slow island")
    parser.add_argument("--tune", action="store_true", help="try six settings of each method first")
    parser.add_argument("--json", type=Path, help="results are kept here, method by method, and gone on with")
    parser.add_argument("--plot", type=Path)
    return parser


def main() -> int:
    options = arguments().parse_args()
    torch.set_num_threads(1)  # as one island's step is measured; several races share a machine
    names = options.methods.split(",")
    if unknown := [name for name in names if name not in FIELD]:
        print(f"race: no method {unknown[0]!r}; there are {', '.join(FIELD)}", file=sys.stderr)
        return 2
    seeds = [int(seed) for seed in options.seeds.split(",")]
    course = Course(
        options.size,
        options.partition,
        options.islands,
        options.steps,
        options.judge_every,
        TUNING_SEED,
        options.absent,
        options.device,
    )
    kept = Kept(options.json, course)
    step_s = kept.step_s()
    settings = {name: tuned(kept, course, name, options.tune) for name in names}
    laps = {name: [kept.lap(name, settings[name], replace(course, seed=seed)) for seed in seeds] for name in names}
    target = target_of(kept, course, settings.get("ddp") or tuned(kept, course, "ddp", options.tune))
    entries = course.task().entries
    links = {
        float(rho): link_of(float(rho), entries, course.islands, step_s, options.latency_ms / 1e3)
        for rho in options.rho.split(",")
    }
    print(f"{datetime.date.today()}  {platform.machine()}  torch {torch.__version__}")
    print(
        f"island-lm {course.size} ({entries / 1e6:.2f} M parameters), {course.partition}, {course.islands} islands, "
        f"{course.steps} steps, seeds {options.seeds}; a step {step_s * 1e3:.0f} ms; target {target:.3f} nats a byte"
    )
    for rho, network in links.items():
        print(f"  rho {rho:g}: links of {network.up_bps / 1e6:.2f} Mbit/s")
    print(table(laps, settings, target, links, step_s, entries))
    if options.conditions:
        print(times_under(laps, target, links, step_s, trace.read(trace.WAN).mbit_s))
    for verdict in [*validity(laps), *advised(laps, target, links, step_s)]:
        print(verdict)
    if options.plot:
        draw(options.plot, laps, target, links, step_s)
    return 0


class Kept:
    """Results in a file, so that a race can be gone on with; laps of another course are not taken."""

    def __init__(self, path: Path | None, course: Course) -> None:
        self._path, self._course = path, course
        self._data: dict[str, Any] = {"course": asdict(course), "laps": {}, "settings": {}}
        if path is not None and path.exists():
            read = json.loads(path.read_text())
            if read["course"] != asdict(course):
                raise SystemExit(f"race: {path} holds another course: {read['course']}. Name another file")
            self._data = read

    def step_s(self) -> float:
        """Measured once: times of methods that were added later are of the same steps."""
        if "step_s" not in self._data:
            self._data["step_s"] = measured_step_s(self._course)
            self._write()
        return float(self._data["step_s"])

    def setting(self, name: str) -> Setting | None:
        stored = self._data["settings"].get(name)
        return Setting(**stored["best"]) if stored is not None else None

    def keep_setting(self, name: str, best: Setting, finals: Sequence[float]) -> None:
        self._data["settings"][name] = {"best": asdict(best), "finals": list(finals)}
        self._write()

    def lap(self, name: str, setting: Setting, course: Course) -> Lap:
        key = f"{name} {json.dumps(asdict(setting))} seed {course.seed}"
        if key not in self._data["laps"]:
            begun = time.monotonic()
            lap = run(course, course.task(), FIELD[name], setting)
            stored = asdict(lap)
            stored["exchanges"] = _folded([tuple(asdict(one).values()) for one in lap.exchanges])
            self._data["laps"][key] = stored
            self._write()
            print(
                f"{name} seed {course.seed}: {lap.losses[-1][1]:.3f} after {time.monotonic() - begun:.0f} s",
                file=sys.stderr,
            )
        stored = self._data["laps"][key]
        return Lap(
            tuple((step, loss) for step, loss in stored["losses"]),
            tuple(Exchange(*one) for one in _unfolded(stored["exchanges"])),
            tuple(stored["speeds"]),
            stored["steps"],
            tuple(stored.get("rows", ())),
        )

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._data))


def _folded(rows: Sequence[tuple[float, ...]]) -> list[list[Any]]:
    """Exchanges of one kind differ in their steps alone: each kind once, with its steps."""
    kinds: dict[tuple[float, ...], list[float]] = {}
    for after, due, *rest in rows:
        kinds.setdefault((due - after, *rest), []).append(after)
    return [[list(kind), steps] for kind, steps in kinds.items()]


def _unfolded(kinds: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    rows = [(after, after + kind[0], *kind[1:]) for kind, steps in kinds for after in steps]
    return sorted(rows)


def measured_step_s(course: Course) -> float:
    """Median seconds of one island's step, of 20 after 5. On a CPU they are the processor's: the same however busy the
    machine is."""
    task, on_gpu = replace(course, seed=0).task(), course.device == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    lap_s = []
    replica = Replica(task, Batches(everything(task.size), task.size, 0, 0), 1e-3, 100)
    for step in range(25):
        begun = clock()
        replica.local_step(step)
        if on_gpu:
            torch.cuda.synchronize()
        lap_s.append(clock() - begun)
    return statistics.median(lap_s[5:])


def tuned(kept: Kept, course: Course, name: str, tune: bool) -> Setting:
    known = kept.setting(name)
    if known is None and tune:
        half = replace(course, steps=course.steps // 2)
        known, finals = best_setting(half, half.task(), FIELD[name])
        kept.keep_setting(name, known, finals)
        print(f"{name}: {known} of {', '.join(f'{one:.3f}' for one in finals)}", file=sys.stderr)
    return known or FIELD[name].settings[0]


def target_of(kept: Kept, course: Course, setting: Setting) -> float:
    """What DDP reaches on seed 0 after 30 % of its steps."""
    lap = kept.lap("ddp", setting, course)
    return next(loss for step, loss in lap.losses if step + 1 >= TARGET_SHARE * course.steps)


def validity(laps: Mapping[str, Sequence[Lap]]) -> list[str]:
    """Whether the exchange matters on this course."""
    final = {name: statistics.median(lap.losses[-1][1] for lap in ones) for name, ones in laps.items()}
    exchanging = {name: loss for name, loss in final.items() if FIELD[name].exchanges}
    said = []
    if "alone" in final and exchanging:
        gap = final["alone"] - min(exchanging.values())
        word = "valid" if gap >= NEEDED_GAP else "INVALID"
        said.append(f"{word}: the best island alone ends {gap:.3f} nats above the best exchange (needed {NEEDED_GAP})")
    if "ddp" in final:
        others = {name: loss for name, loss in exchanging.items() if not name.startswith("ddp")}
        ahead = [name for name, loss in others.items() if loss < final["ddp"]]
        said.append(f"INVALID: {', '.join(ahead)} ended below DDP" if ahead else "valid: DDP is first per step")
    return said


if __name__ == "__main__":
    sys.exit(main())
