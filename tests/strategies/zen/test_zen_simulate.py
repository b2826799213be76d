"""Step times of strategy `zen` in the simulator: those of `dense` for what is dense, and the planner's for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.controller.simulator import cluster
from atoll.controller.simulator.scenario import Scenario, check
from atoll.controller.simulator.steps import Computing, Network
from atoll.errors import BadInput
from atoll.planning.sparse_scheme import costs, densities_between
from atoll.strategies.dense.simulate import DenseSteps
from atoll.strategies.zen.simulate import ZenSteps

TABLE = {"rows": 500_000, "width": 48, "density": 0.002, "density_of_all": 0.007}
COMPUTING = Computing(np.array([0.01, 0.02]), np.array([0.02, 0.01]))


def built(**changes: Any) -> cluster.Cluster:
    document: dict[str, Any] = {
        "strategy": "zen",
        "entries": 24_100_000,
        "total_batch": 512,
        "devices": [
            {"island": "a", "q": 1e-5, "s": 1e-3, "k": 1e-5, "m": 1e-3},
            {"island": "b", "q": 1e-5, "s": 1e-3, "k": 1e-5, "m": 1e-3},
        ],
        "links": {"a": {"mbit_s": 100}, "b": {"mbit_s": 50}},
        "overlap": {"noise": 0.0},
        "sparse": TABLE,
    }
    return cluster.build(check(Scenario, {**document, **changes}, "test"), Path())


def seconds(what: cluster.Cluster, *islands: str) -> float:
    return ZenSteps(what, islands, 0.0).exact_s(COMPUTING, {}, Network(0.0, what.links))


def test_the_sum_of_a_table_takes_what_the_planner_says_of_the_thinnest_link() -> None:
    """Two islands, 50 Mbit/s: the dense step of the other 100,000 entries, and the cheapest of the schemes that keep
    rows as they are; less where rows repeat, and another time where the job asks for a scheme."""
    what = built()
    zen = ZenSteps(what, ["a", "b"], 0.0)
    found = costs(zen._sums)
    assert zen._sums.densities == densities_between(0.002, 0.007, 2)
    by_bytes = {name: (one - _rounds(name)) / (50 * 125_000) + _rounds(name) for name, one in found.items()}
    dense = DenseSteps(built(entries=100_000, sparse=None, strategy="dense"), ["a", "b"], 0.0)
    dense_s = dense.exact_s(COMPUTING, {}, Network(0.0, what.links))
    assert seconds(what, "a", "b") == pytest.approx(dense_s + min(by_bytes["agsparse"], by_bytes["zen"]))
    assert seconds(built(sparse={**TABLE, "distinct": 0.3}), "a", "b") < seconds(what, "a", "b")
    for scheme in ("allreduce", "zen", "sparse-ps"):
        asked = seconds(built(zen={"scheme": scheme}), "a", "b")
        assert asked == pytest.approx(dense_s + by_bytes[scheme])


def _rounds(scheme: str) -> float:
    return 0.0005 * {"agsparse": 1, "sparcml": 1}.get(scheme, 2)


def test_a_step_in_time_is_the_exact_one_where_nothing_is_noisy() -> None:
    what = built()
    timed = ZenSteps(what, ["a", "b"], 5.0).step(COMPUTING, {}, Network(5.0, what.links), np.random.default_rng(0))
    assert timed.ends_s - 5.0 == pytest.approx(seconds(what, "a", "b"))
    assert timed.step_N.tolist() == pytest.approx([timed.ends_s - 5.0] * 2)


def test_a_model_that_is_all_table_has_a_time_too() -> None:
    assert seconds(built(entries=24_000_000), "a", "b") < seconds(built(), "a", "b")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sparse": None}, "strategy = 'zen' needs .sparse.: rows, width"),
        ({"sparse": {**TABLE, "rows": 10**6}}, "sparse has more entries than the model's 24100000"),
        ({"sparse": {**TABLE, "density": 0.1}}, "density_of_all = 0.007 must be at least density = 0.1"),
        ({"sparse": {**TABLE, "density": 2}}, "density"),
    ],
)
def test_a_scenario_that_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        built(**changes)
