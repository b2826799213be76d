"""Progress, step time, total batch and what plans tell the strategy against simulated time, a line for each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from atoll.controller.simulator.outcome import Outcome, Point
from atoll.controller.simulator.report import MAX_POINTS


def _param(name: str, point: Point) -> float:
    return float(point.params[name])


def draw(title: str, outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the figure. Raises OSError, or ValueError for an ending that matplotlib does not know."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    panels: list[tuple[str, Callable[[Point], float]]] = [
        ("progress (samples)", lambda point: point.progress),
        ("step (ms)", lambda point: 1000 * point.step_s),
        ("total batch", lambda point: point.total_batch),
    ]
    names = sorted({name for outcome in outcomes for point in outcome.points for name in point.params})
    panels += [(name, partial(_param, name)) for name in names]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(8, 2.2 * len(panels) + 0.5), squeeze=False, sharex=True, layout="constrained"
    )
    for axis, (label, of) in zip(axes[:, 0], panels, strict=True):
        axis.set_ylabel(label)
        for outcome in outcomes:
            points = outcome.points[:: -(-len(outcome.points) // MAX_POINTS)]
            axis.plot([point.now_s for point in points], [of(point) for point in points], label=outcome.policy)
    axes[0, 0].set_title(title)
    axes[0, 0].legend(fontsize="small")
    axes[-1, 0].set_xlabel("simulated seconds")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
