"""Stage 9: the race with a GPT of 126 M parameters: four islands on one device, each step's time and bytes counted.

The islands train one after the other; the race's virtual clock says when each step would have ended on links of a given
thickness. Its results stay in the output folder, where `benchmarks/race.py --json` reads them."""

from __future__ import annotations

import importlib.util
import math
import os
import traceback
from typing import Final

from race import Kept, target_of
from racing.clock import Network, link_of
from racing.course import Course, Lap
from racing.domains import DOMAINS, domain
from racing.field import FIELD
from racing.inner import Setting
from racing.report import draw, table

from gpu_check.rows import Rows
from gpu_check.wheels import CACHE

METHODS: Final = ("ddp", "local-steps", "streaming-24-4bit", "sparseloco-30", "powersgd-2")
RHOS: Final = (4.0, 40.0, 400.0)
COURSES: Final = {
    "cuda": Course("124M", "P1", islands=4, steps=400, judge_every=20, seed=0, device="cuda"),
    "cpu": Course("XXS", "P1", islands=4, steps=40, judge_every=10, seed=0),
}


def run(device: str, rows: Rows) -> None:
    if CACHE.is_dir():
        os.environ["XDG_CACHE_HOME"] = str(CACHE)
    try:
        for name in DOMAINS:
            domain(name)
    except SystemExit as error:
        rows.skip("the race", str(error))
        return
    course = COURSES[device]
    (rows.out / "race.json").unlink(missing_ok=True)  # of an earlier check, perhaps of other code
    kept = Kept(rows.out / "race.json", course)
    step_s, entries = kept.step_s(), course.task().entries
    laps: dict[str, list[Lap]] = {}
    for name in METHODS:
        try:
            laps[name] = [kept.lap(name, _setting(name), course)]
        except Exception:  # noqa: BLE001 - a method that fails is a row, and the next one races
            rows.check(name, False, traceback.format_exc())
    if "ddp" not in laps:
        return
    target = target_of(kept, course, _setting("ddp"))
    links = {rho: link_of(rho, entries, course.islands, step_s) for rho in RHOS}
    rows.add("a step", "passed", f"{step_s * 1e3:.1f} ms, {entries / 1e6:.1f} M parameters", ms=step_s * 1e3)
    for name, (lap,) in laps.items():
        text, figures = _told(lap, target, links, step_s, entries)
        rows.check(name, math.isfinite(lap.losses[-1][1]) and lap.losses[-1][1] < lap.losses[0][1], text, **figures)
    print(table(laps, {name: _setting(name) for name in laps}, target, links, step_s, entries))
    if importlib.util.find_spec("matplotlib") is None:
        rows.skip("plot", "no matplotlib; benchmarks/race.py --json race.json --plot race.png draws it elsewhere")
        return
    draw(rows.out / "race.png", laps, target, links, step_s)
    rows.check("plot", (rows.out / "race.png").stat().st_size > 0, "race.png")


def _setting(name: str) -> Setting:
    return FIELD[name].settings[0]


def _told(
    lap: Lap, target: float, links: dict[float, Network], step_s: float, entries: int
) -> tuple[str, dict[str, float]]:
    """Return a row's text and figures: the last loss, bytes, and seconds to DDP's loss after 30 % of its steps."""
    reached = {rho: lap.seconds_to(target, network, step_s) for rho, network in links.items()}
    loss, sent = lap.losses[-1][1], lap.up_bytes / lap.steps / entries
    times = ", ".join(
        f"{'not reached' if time is None else f'{time:.1f} s'} at rho {rho:g}" for rho, time in reached.items()
    )
    figures = {f"seconds_{rho:g}": time for rho, time in reached.items() if time is not None}
    text = f"{loss:.3f} nats, {sent:.4f} bytes a parameter and step, to {target:.3f}: {times}"
    return text, {"loss": loss, "sent": sent, **figures}
