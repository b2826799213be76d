"""The surrogate as a picture: extra loss over the sparsity, a panel for each total batch, with its uncertainty."""

from __future__ import annotations

import math
from pathlib import Path

from atoll.profiling.document import Document, Grid
from atoll.profiling.profiler import tried


def draw(document: Document, path: Path) -> None:
    """document: complete. Bands are two standard errors; crosses the probes, at the top where training diverged."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    grid, error = document.compression, document.error
    assert grid is not None
    assert error is not None
    columns = min(4, len(grid.batches))
    rows = math.ceil(len(grid.batches) / columns)
    size = (3.2 * columns, 2.6 * rows + 0.4)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    kept = [1 - sparsity for sparsity in grid.sparsities]
    seen = [(one, 100 * (one.ratio - 1)) for one in tried(document)]
    finite = [percent for _, percent in seen if math.isfinite(percent)]
    top = max([5.0, *finite, *(100 * value for row in grid.extra for value in row)]) * 1.1
    for number, batch in enumerate(grid.batches):
        axis = axes[number // columns][number % columns]
        middle, low, high = _curves(grid, error, number)
        axis.plot(kept, middle, color="C0", linewidth=1.2)
        axis.fill_between(kept, low, high, color="C0", alpha=0.2, linewidth=0)
        points = [(1 - one.sparsity, percent) for one, percent in seen if one.batch == batch]
        axis.plot(
            [x for x, _ in points], [y if math.isfinite(y) else top for _, y in points], "x", color="C1", markersize=5
        )
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.set_xscale("log")
        axis.set_xlim(1.2, min(kept) / 1.2)
        axis.set_title(f"batch {batch}", fontsize="small")
    for unused in range(len(grid.batches), rows * columns):
        axes[unused // columns][unused % columns].set_visible(False)
    axes[0][0].set_ylim(min([-5.0, *finite]) * 1.1, top)
    figure.supxlabel("share of the entries sent in a step, 1 - sparsity", fontsize="small")
    figure.supylabel("extra loss, %", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(
    grid: Grid, error: tuple[tuple[float, ...], ...], column: int
) -> tuple[list[float], list[float], list[float]]:
    """Percent of extra loss: expected, and two standard errors below and above."""
    ratios = [1 + row[column] for row in grid.extra]
    spread = [math.exp(2 * row[column]) for row in error]
    return (
        [100 * (ratio - 1) for ratio in ratios],
        [100 * (ratio / wide - 1) for ratio, wide in zip(ratios, spread, strict=True)],
        [100 * (ratio * wide - 1) for ratio, wide in zip(ratios, spread, strict=True)],
    )
