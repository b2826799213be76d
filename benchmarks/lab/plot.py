"""Loss against time: a row for each model and number of workers, a column for each rate, a line for each method.

A dashed line is extrapolated: the losses of the method's unshaped run, at the speed that this rate allows."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.errors import BadInput
from lab.options import Rate
from lab.results import Result, stretched
from lab.tables import unshaped_of


def refuse_without_matplotlib() -> None:
    """Raises BadInput: before anything is measured, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--plot needs matplotlib: pip install 'atoll[examples]'")


def draw(results: Sequence[Result], targets: Mapping[str, float | None], path: Path) -> None:
    """Write the figure. Time is on a log scale, for methods differ by tens. targets: a loss for each model, or None."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    rows = list(dict.fromkeys((one.model, one.workers) for one in results))
    columns = list(dict.fromkeys((one.rate, one.rtt_ms) for one in results))
    methods = list(dict.fromkeys(one.method for one in results))
    size = (4.2 * len(columns), 3.2 * len(rows) + 0.6)
    figure, axes = pyplot.subplots(len(rows), len(columns), figsize=size, squeeze=False, layout="constrained")
    for row, (model, workers) in enumerate(rows):
        for column, (rate, rtt_ms) in enumerate(columns):
            axis = axes[row][column]
            axis.set_title(f"{model}, {workers} workers, {Rate.parse(rate)}{f', {rtt_ms:g} ms' if rtt_ms else ''}")
            axis.set_xlabel("seconds")
            axis.set_ylabel("training loss")
            axis.set_xscale("log")
            for one in results:
                if (one.model, one.workers, one.rate, one.rtt_ms) != (model, workers, rate, rtt_ms):
                    continue
                unshaped = unshaped_of(one, results)
                curve, style = one.smooth(), "-"
                if one.ended and one.step_s and unshaped is not None and unshaped is not one:
                    curve, style = stretched(one, unshaped), "--"
                seconds, losses = [point.at_s for point in curve], [point.loss for point in curve]
                axis.plot(seconds, losses, style, color=f"C{methods.index(one.method)}", linewidth=1.2)
            if (target := targets.get(model)) is not None:
                axis.axhline(target, color="grey", linewidth=0.7, linestyle=":")
    handles = [Line2D([], [], color=f"C{number}", label=method) for number, method in enumerate(methods)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4) or 1, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
