"""What benchmarks/zen.py asks the planner is what its data have."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

from atoll.strategies.zen.coordinates import Coordinates, UnitShape

spec = importlib.util.spec_from_file_location("zen_benchmark", Path(__file__).parents[2] / "benchmarks" / "zen.py")
assert spec is not None
assert spec.loader is not None
zen = importlib.util.module_from_spec(spec)
sys.modules["zen_benchmark"] = zen
spec.loader.exec_module(zen)


def term(units: list[int], width: int) -> Coordinates:
    return Coordinates(np.array(units, np.uint32), np.ones((len(units), width), np.float32))


def test_densities_skew_and_repetitions_are_counted() -> None:
    """Two workers with 4 and 2 of 8 rows: 3 of 8 in the mean, 5 in the sum. Of the lower half 2 each and 3 of the
    sum, in all 5 of the 8 that a worker pushes or pulls in the mean: skew 5 / 4. All values are alike."""
    data = zen.Data("test", UnitShape(8, 128), [term([0, 1, 4, 5], 128), term([1, 2], 128)])
    given = data.planned(100.0)
    assert given.densities == (3 / 8, 5 / 8)
    assert given.block_densities == (1 / 2, 3 / 4)  # blocks of 2 rows: 0 and 2, 0 and 1, of 4
    assert given.skew == 5 / 4
    assert (given.bandwidth, given.distinct, given.value_bytes) == (12_500_000.0, 1 / 4, 512.0)


def test_synthetic_gradients_cluster_and_overlap() -> None:
    data = zen.synthetic(0.05, 4)
    given = data.planned(100.0)
    assert abs(given.densities[0] - 0.05) < 1e-4
    assert given.densities[3] < 0.9 * 4 * 0.05
    assert given.skew > 1.5
    assert given.distinct == 1.0
