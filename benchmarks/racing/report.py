"""The race's table, and its curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from racing.clock import Network, conditions
from racing.course import Lap
from racing.inner import Setting

SLOW: Final = "an island three times slower"
SPLIT: Final = f"{SLOW}, batches by speed"
"""As a plan splits them: all steps take as long, and what is learnt in one is taken to be as much."""


def table(
    laps: Mapping[str, Sequence[Lap]],
    settings: Mapping[str, Setting],
    target: float,
    links: Mapping[float, Network],
    step_s: float,
    entries: int,
) -> str:
    """Markdown, medians over seeds; a method that missed the target on any seed has a dash there."""
    times = "".join(f" s at rho {rho:g} |" for rho in links)
    rows = [
        f"| method | rate | final (spread) | steps to target | B/param/step |{times}",
        "|---|---|---|---|---|" + "---|" * len(links),
    ]
    for name, ones in laps.items():
        finals = [lap.losses[-1][1] for lap in ones]
        cells = [
            name,
            f"{settings[name].learning_rate:g}",
            f"{statistics.median(finals):.3f} ({max(finals) - min(finals):.3f})",
            _median([lap.steps_to(target) for lap in ones], ".0f"),
            f"{statistics.median(lap.up_bytes / lap.steps / entries for lap in ones):.4f}",
            *(_median([lap.seconds_to(target, link, step_s) for lap in ones], ".1f") for link in links.values()),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def times_under(
    laps: Mapping[str, Sequence[Lap]],
    target: float,
    links: Mapping[float, Network],
    step_s: float,
    trace: Sequence[float],
) -> str:
    """Markdown: seconds to the target on worse links, and where one island of many takes three times as long."""
    columns = [(rho, name) for rho, link in links.items() for name in (*conditions(link, step_s, trace), SLOW, SPLIT)]
    rows = [
        "| method |" + "".join(f" s at rho {rho:g}, {name} |" for rho, name in columns),
        "|---|" + "---|" * len(columns),
    ]
    for method, ones in laps.items():
        cells = []
        for rho, name in columns:
            link = conditions(links[rho], step_s, trace).get(name, links[rho])
            timed = [with_slow_island(lap) if name in {SLOW, SPLIT} else lap for lap in ones]
            timed = [with_batches_by_speed(lap) if name == SPLIT else lap for lap in timed]
            cells.append(_median([lap.seconds_to(target, link, step_s) for lap in timed], ".1f"))
        rows.append("| " + " | ".join([method, *cells]) + " |")
    return "\n".join(rows)


def with_slow_island(lap: Lap) -> Lap:
    """Of several, the last; who is alone is as fast as the others."""
    return replace(lap, speeds=(*lap.speeds[:-1], lap.speeds[-1] / 3)) if len(lap.speeds) > 1 else lap


def with_batches_by_speed(lap: Lap) -> Lap:
    """The same total batch: all are as slow as they are on average."""
    mean = sum(lap.speeds) / len(lap.speeds)
    return replace(lap, speeds=(mean,) * len(lap.speeds))


def _median(values: Sequence[float | None], spec: str) -> str:
    reached = [value for value in values if value is not None]
    return (
        format(statistics.median(reached), spec) if len(reached) == len(values) else f"- ({len(reached)}/{len(values)})"
    )


def draw(
    path: Path, laps: Mapping[str, Sequence[Lap]], target: float, links: Mapping[float, Network], step_s: float
) -> None:
    """Held-out loss against virtual seconds for each link, and against bytes, of each method's first seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(links) + 1, figsize=(5 * (len(links) + 1), 4.5), sharey=True)
    colours = [pyplot.get_cmap("turbo")(place / max(1, len(laps) - 1)) for place in range(len(laps))]
    for (name, ones), colour in zip(laps.items(), colours, strict=True):
        for axis, link in zip(axes, links.values(), strict=False):
            curve = ones[0].timed(link, step_s)
            axis.plot([time for time, _ in curve], [loss for _, loss in curve], color=colour, label=name, linewidth=1)
        per_step = ones[0].up_bytes / ones[0].steps
        if per_step:
            axes[-1].plot(
                [per_step * (step + 1) for step, _ in ones[0].losses],
                [loss for _, loss in ones[0].losses],
                color=colour,
                linewidth=1,
            )
    for axis, rho in zip(axes, links, strict=False):
        axis.set(xlabel=f"virtual seconds, rho {rho:g}", xscale="log")
    axes[-1].set(xlabel="bytes an island sent", xscale="log")
    for axis in axes:
        axis.axhline(target, color="grey", linewidth=0.5)
    axes[0].set(ylabel="held-out loss, nats a byte")
    axes[0].legend(fontsize=5)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
