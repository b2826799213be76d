from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.controller.planners.batches.gns import combine
from atoll.controller.planners.batches.water_filling import F64
from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput

BATCHES = (4, 12, 48)
TRIALS = 1500
DIMENSIONS = 200


def run(**data: Any) -> Any:
    return json.loads(PLANNERS["gns"].run_json(json.dumps(data)))


def steps(sqnorm: float) -> Iterator[tuple[tuple[float, ...], float]]:
    """Squared norms, of each node and of the whole, in steps where |G|^2 = sqnorm and tr(Sigma) = 1.

    A node's mean gradient is drawn as such: normal, with variance 1 / DIMENSIONS / b in every dimension."""
    rng = np.random.default_rng(20240817)
    b = np.array(BATCHES, dtype=np.float64)
    for _ in range(TRIALS):
        local = rng.standard_normal((len(b), DIMENSIONS)) / np.sqrt(DIMENSIONS * b)[:, None] + math.sqrt(
            sqnorm / DIMENSIONS
        )
        whole = (b / b.sum()) @ local
        yield tuple((local**2).sum(axis=1).tolist()), float(whole @ whole)


def printed(batches: Sequence[int], local_sqnorms: Sequence[float], mean_sqnorm: float) -> tuple[float, float]:
    """Cannikin (2024), Eq. 10 with the weights of Theorem 4.1 as they stand in the paper. O(n^3)."""
    b, local = np.array(batches, dtype=np.float64), np.array(local_sqnorms)
    total = b.sum()
    rest = total - b
    sqnorm = (total * mean_sqnorm - b * local) / rest
    trace = b * total / rest * (local - mean_sqnorm)
    both = np.outer(rest, rest)
    between = (total**2 - b[:, None] ** 2 - b**2) / (total * both)
    np.fill_diagonal(between, (total + 2 * b) / (total * rest))
    between_traces = np.outer(b, b) * (total - b[:, None] - b) / both
    np.fill_diagonal(between_traces, total * b / rest)
    return float(least_variance(between_traces) @ trace), float(least_variance(between) @ sqnorm)


def least_variance(covariance: F64) -> F64:
    """Weights of the combination with the least variance: A^-1 1, made to sum to one."""
    raised = np.linalg.solve(covariance, np.ones(len(covariance)))
    return np.asarray(raised / raised.sum(), dtype=np.float64)


Combine = Callable[[Sequence[int], Sequence[float], float], tuple[float, float]]


@functools.cache
def estimates(sqnorm: float, weighted: Combine) -> NDArray[np.float64]:
    """(trace, sqnorm) [TRIALS, 2]."""
    return np.array([weighted(BATCHES, local, whole) for local, whole in steps(sqnorm)])


def plain_means(sqnorm: float) -> NDArray[np.float64]:
    """Of the nodes' own estimates of the trace, all weighted alike. [TRIALS]"""
    b, total = np.array(BATCHES), sum(BATCHES)
    return np.array([(b * total / (total - b) * (np.array(local) - whole)).mean() for local, whole in steps(sqnorm)])


@pytest.mark.parametrize("weighted", [combine, printed])
@pytest.mark.parametrize("sqnorm", [10.0, 0.01])
def test_both_ways_to_combine_are_unbiased_within_three_standard_errors(sqnorm: float, weighted: Combine) -> None:
    found = estimates(sqnorm, weighted)
    errors = found.std(axis=0, ddof=1) / math.sqrt(TRIALS)
    assert np.abs(found.mean(axis=0) - [1.0, sqnorm]).tolist() <= (3 * errors).tolist()


def test_pooling_has_a_hundredth_of_the_variance_of_the_printed_weights_where_the_gradient_is_large() -> None:
    """What the covariance as printed costs: |G|^2 = 10, tr(Sigma) = 1. At |G|^2 = 0.01 both are near each other."""
    pooled, as_printed = estimates(10.0, combine)[:, 0].var(), estimates(10.0, printed)[:, 0].var()
    assert pooled == pytest.approx(0.005, rel=0.15)
    assert as_printed == pytest.approx(0.560, rel=0.15)
    assert plain_means(10.0).var() == pytest.approx(2.1, rel=0.15)
    assert estimates(0.01, printed)[:, 0].var() == pytest.approx(0.0082, rel=0.15)


def test_equal_batches_are_weighted_alike_by_both() -> None:
    norms = ([8, 8, 8], [2.0, 3.0, 4.0], 1.5)
    assert printed(*norms) == pytest.approx(combine(*norms))


def test_a_step_worked_out_by_hand() -> None:
    """S = (4 * 2 + 12 * 1 - 16 * 1) / (2 - 1) = 4, |G|^2 = 1 - 4 / 16."""
    found = run(batches=[4, 12], local_sqnorms=[2.0, 1.0], global_sqnorm=1.0)
    assert found == {"trace": 4.0, "sqnorm": 0.75, "noise_scale": pytest.approx(16 / 3)}


def test_a_node_without_samples_says_nothing() -> None:
    with_it = run(batches=[4, 0, 12], local_sqnorms=[2.0, 99.0, 1.0], global_sqnorm=1.0)
    assert with_it == run(batches=[4, 12], local_sqnorms=[2.0, 1.0], global_sqnorm=1.0)


def test_a_gradient_that_drowns_in_noise_has_no_noise_scale() -> None:
    found = run(batches=[4, 12], local_sqnorms=[20.0, 1.0], global_sqnorm=1.0)
    assert found["sqnorm"] < 0
    assert found["noise_scale"] is None


def test_equal_gradients_have_no_noise() -> None:
    assert run(batches=[4, 12], local_sqnorms=[3.0, 3.0], global_sqnorm=3.0)["noise_scale"] == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"batches": [8], "local_sqnorms": [1.0]}, "1 nodes with samples: the noise shows between two or more"),
        ({"batches": [8, 0], "local_sqnorms": [1.0, 1.0]}, "Give two successive steps"),
        ({"batches": [8, 8], "local_sqnorms": [1.0]}, "2 batches and 1 local_sqnorms"),
        ({"batches": [8, 8], "local_sqnorms": [1.0, -1.0]}, r"local_sqnorms\[1\] = -1.0"),
        ({"batches": [8, 8], "local_sqnorms": [1.0, None]}, r"local_sqnorms\[1\] = None"),
        ({"batches": [8, 8.0], "local_sqnorms": [1.0, 1.0]}, r"batches\[1\] = 8.0"),
        ({"batches": [8, 8], "local_sqnorms": [1e300, 1.0]}, r"local_sqnorms\[0\] = 1e\+300"),
        ({"batches": [8, 8], "local_sqnorms": [1.0, 1.0], "weights": "best"}, "unknown field 'weights'"),
    ],
)
def test_bad_input_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(**{"global_sqnorm": 1.0} | data)
