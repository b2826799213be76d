"""Plot of the surrogate: extra loss over the sparsity, a panel for each total batch, with its uncertainty."""

from __future__ import annotations

import math
from pathlib import Path

from atoll.profiling.document import Document
from atoll.profiling.profiler import tried

COLUMNS = 4


def draw(document: Document, path: Path) -> None:
    """Draw a complete profile. Bands are two standard errors; crosses are probes, at the top if training diverged."""
    import matplotlib as mpl
    import numpy as np

    mpl.use("agg")
    from matplotlib import pyplot

    grid, error = document.compression, document.error
    assert grid is not None
    assert error is not None
    columns = min(COLUMNS, len(grid.batches))
    rows = math.ceil(len(grid.batches) / columns)
    size = (3.2 * columns, 2.6 * rows + 0.4)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    kept, ratio, spread = 1 - np.array(grid.sparsities), 1 + np.array(grid.extra), np.exp(2 * np.array(error))
    seen = [(one, 100 * (one.ratio - 1)) for one in tried(document)]
    finite = [percent for _, percent in seen if math.isfinite(percent)]
    top = max([5.0, *finite, 100 * float(ratio.max() - 1)]) * 1.1
    for number, axis in enumerate(axes.flat):
        axis.set_visible(number < len(grid.batches))
        if number >= len(grid.batches):
            continue
        middle, wide = ratio[:, number], spread[:, number]
        axis.plot(kept, 100 * (middle - 1), color="C0", linewidth=1.2)
        axis.fill_between(
            kept, 100 * (middle / wide - 1), 100 * (middle * wide - 1), color="C0", alpha=0.2, linewidth=0
        )
        points = [
            (1 - one.sparsity, y if math.isfinite(y) else top) for one, y in seen if one.batch == grid.batches[number]
        ]
        axis.plot([x for x, _ in points], [y for _, y in points], "x", color="C1", markersize=5)
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.set_xscale("log")
        axis.set_xlim(1.2, min(kept) / 1.2)
        axis.set_title(f"batch {grid.batches[number]:.0f}", fontsize="small")
    axes[0][0].set_ylim(min([-5.0, *finite]) * 1.1, top)
    figure.supxlabel("share of the entries sent in a step, 1 - sparsity", fontsize="small")
    figure.supylabel("extra loss, %", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
