"""Planner sparse-scheme: its costs are the formulas of docs/planners.md, and Zen's theorems hold of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.controller.planners.registry import SPARSE_SCHEME
from atoll.errors import BadInput
from atoll.planning.sparse_scheme import SCHEMES, SparseSchemeInput, costs, plan_sparse_scheme


@st.composite
def inputs(draw: st.DrawFn, least_workers: int = 2) -> SparseSchemeInput:
    n = draw(st.integers(least_workers, 64))
    first = draw(st.floats(1e-6, 1))
    growth = draw(st.floats(0, 1))
    densities = tuple(min(1.0, first * k**growth) for k in range(1, n + 1))
    blocks = tuple(min(1.0, 3 * d) for d in densities) if draw(st.booleans()) else None
    return SparseSchemeInput(
        workers=n,
        entries=draw(st.integers(1, 10**9)),
        densities=densities,
        block_densities=blocks,
        skew=draw(st.floats(1, n)),
        value_bytes=draw(st.sampled_from([2.0, 4.0, 256.0])),
        index_bytes=draw(st.sampled_from([4.0, 8.0])),
        bandwidth=draw(st.floats(1e5, 1e10)),
        latency=draw(st.sampled_from([0.0, 1e-4, 0.05])),
    )


def of(n: int, **said: float) -> SparseSchemeInput:
    fields = {"entries": 1000, "skew": 1.0, "value_bytes": 4.0, "index_bytes": 4.0, "bandwidth": 1.0, "latency": 0.0}
    densities = said.pop("densities")
    return SparseSchemeInput(workers=n, densities=densities, **{**fields, **said})  # type: ignore[arg-type]


def test_costs_of_four_workers_by_hand() -> None:
    """1000 entries; 10, 18, 24 and 28 % in the sums of 1 to 4, blocks 50 to 80 %, skew 2, 1 byte a second."""
    given_ = SparseSchemeInput(4, 1000, (0.1, 0.18, 0.24, 0.28), 2.0, 4.0, 4.0, 1.0, 1.0, (0.5, 0.6, 0.7, 0.8))
    assert costs(given_) == pytest.approx(
        {
            "allreduce": 2 * 3 / 4 * 4000 + 6,
            "agsparse": 3 * 100 * 8 + 3,
            "sparcml": (100 + 180) * 8 + 2,
            "sparse-ps": 3 / 4 * 2 * (100 + 280) * 8 + 2,
            "omnireduce": 3 / 4 * 2 * 1.3 * 4000 + 2,
            "zen": 3 / 4 * (100 * 8 + 280 * 4 + 125) + 2,
        }
    )
    assert plan_sparse_scheme(given_).scheme == "zen"


def test_costs_where_a_workers_values_repeat_by_hand() -> None:
    """A tenth of a worker's values are distinct, of 40 bytes: 4 for them and 2 for the reference to one. That counts
    only where a whole gradient is sent; of 4 bytes half distinct ones, a reference is as long as what it saves."""
    rows = of(4, densities=(0.1, 0.18, 0.24, 0.28), value_bytes=40.0, distinct=0.1)
    once, found, plain = 4 + 2 + 4, costs(rows), costs(replace(rows, distinct=1.0))
    assert found["agsparse"] == pytest.approx(3 * 100 * once)
    assert found["sparcml"] == pytest.approx(100 * once + 180 * 44)
    assert {name: found[name] for name in ("allreduce", "sparse-ps", "zen")} == {
        name: plain[name] for name in ("allreduce", "sparse-ps", "zen")
    }
    assert plan_sparse_scheme(rows).scheme == "agsparse"
    assert plan_sparse_scheme(replace(rows, distinct=1.0)).scheme == "zen"
    entries = of(4, densities=(0.1, 0.18, 0.24, 0.28), distinct=0.5)
    assert costs(entries) == pytest.approx(costs(replace(entries, distinct=1.0)))


@given(inputs())
def test_the_cheapest_is_chosen_and_the_first_of_equals(given_: SparseSchemeInput) -> None:
    plan = plan_sparse_scheme(given_)
    assert plan.costs[plan.scheme] == min(plan.costs.values())
    earlier = SCHEMES[: SCHEMES.index(plan.scheme)]
    assert all(plan.costs[scheme] > plan.costs[plan.scheme] for scheme in earlier if scheme in plan.costs)
    assert ("omnireduce" in plan.costs) == (given_.block_densities is not None)


@given(inputs())
def test_balanced_parallelism_is_never_worse_than_an_even_split(given_: SparseSchemeInput) -> None:
    """Lemma 3.4; and a bitmap is never longer than indices."""
    found = costs(given_)
    assert found["zen"] <= found["sparse-ps"] * (1 + 1e-12)


@given(st.integers(2, 64), st.floats(1e-6, 1e-3))
def test_where_nothing_overlaps_centralised_schemes_win(n: int, density: float) -> None:
    """Theorem 3.1.1: everyone has to receive all that the others have, whichever way."""
    apart = of(n, densities=tuple(min(1.0, k * density) for k in range(1, n + 1)), entries=10**6)
    found = costs(apart)
    assert found["agsparse"] <= found["sparse-ps"]
    if n & (n - 1) == 0:
        assert math.isclose(found["sparcml"], found["agsparse"], rel_tol=1e-9)


@given(st.integers(3, 64), st.floats(1e-4, 1e-1))
def test_where_all_overlaps_zen_wins(n: int, density: float) -> None:
    """Theorem 3.1.2: with the same entries everywhere centralised schemes carry them log n times and more."""
    same = of(n, densities=(density,) * n, entries=10**6, skew=1.5)
    assert plan_sparse_scheme(same).scheme == "zen"


@given(inputs())
def test_time_is_in_proportion_to_entries_and_to_bandwidth(given_: SparseSchemeInput) -> None:
    still = {name: getattr(given_, name) for name in given_.__slots__} | {"latency": 0.0}
    once = costs(SparseSchemeInput(**still))
    twice = costs(SparseSchemeInput(**still | {"bandwidth": 2 * given_.bandwidth, "entries": 2 * given_.entries}))
    assert twice == pytest.approx(once, rel=1e-9)


def test_dense_tensors_are_all_reduced_and_one_worker_sends_nothing() -> None:
    assert plan_sparse_scheme(of(4, densities=(1.0,) * 4)).scheme == "allreduce"
    alone = plan_sparse_scheme(of(1, densities=(0.5,)))
    assert (alone.scheme, set(alone.costs.values())) == ("allreduce", {0.0})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("densities", "[0.1, 0.2]", "densities has 2 entries; give one for each of 1 to 4 workers"),
        ("block_densities", "[0.1]", "block_densities has 1 entries"),
        ("densities", "[0.1, 0.2, 0.3, 1.5]", "densities"),
        ("skew", "0.5", "skew"),
        ("bandwidth", "0", "bandwidth"),
        ("latency", "-1", "latency"),
        ("colour", "1", "colour"),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: str, says: str) -> None:
    fields = {
        "workers": "4",
        "entries": "100",
        "densities": "[0.1, 0.1, 0.1, 0.1]",
        "skew": "1",
        "value_bytes": "4",
        "index_bytes": "4",
        "bandwidth": "1000000",
        "latency": "0",
    }
    text = ", ".join(f'"{name}": {said}' for name, said in (fields | {field: value}).items())
    with pytest.raises(BadInput, match=says):
        SPARSE_SCHEME.run_json(f"{{{text}}}")
