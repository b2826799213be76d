from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import SettingError
from atoll.strategies.stale_sparse.settings import MAX_SPARSITY, StaleSparse


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, f"sparsity = 1.0 should be less than or equal to {MAX_SPARSITY}. Leave it out for 0.8"),
        ({"sparsity": -0.1}, "sparsity = -0.1"),
        ({"sparsity": float("nan")}, "sparsity = nan"),
        ({"staleness": 2}, "staleness = 2 should be less than or equal to 1"),
        ({"staleness": True}, "staleness = True should be a valid integer"),
        ({"selection": "some"}, "selection = 'some' should be 'threshold', 'topk' or 'random'"),
        ({"values": "int3"}, "values = 'int3'"),
        ({"momentum": "none"}, "momentum = 'none'"),
        ({"exchange": "weights"}, "exchange = 'weights' should be 'updates' or 'gradients'"),
        ({"error_feedback": False}, 'error_feedback = False has no meaning with exchange = "updates"'),
        ({"digest_every": 0}, "digest_every = 0 should be greater than or equal to 1. Leave it out for 100"),
        ({"colour": "blue"}, "colour = 'blue' is not known. Known: sparsity, staleness, exchange"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        StaleSparse(**settings)


def test_a_whole_number_will_do_for_a_share() -> None:
    assert StaleSparse(sparsity=0).sparsity == 0.0


def test_other_values_are_checked_too() -> None:
    assert StaleSparse(values="float32").with_values(sparsity=0.5) == StaleSparse(values="float32", sparsity=0.5)
    with pytest.raises(SettingError, match="staleness = 3"):
        StaleSparse().with_values(staleness=3)


def test_gradients_are_exchanged_as_published_unless_it_is_said_otherwise() -> None:
    published = StaleSparse(exchange="gradients")
    assert (published.sparsity, published.values) == (0.99, "float16")
    assert StaleSparse(exchange="gradients", sparsity=0.9, values="int4").said().items() >= {
        "sparsity": 0.9, "values": "int4",
    }.items()  # fmt: skip
    assert StaleSparse(exchange="gradients", sparsity=0.9).sparsity == 0.9
    updates = StaleSparse()
    assert (updates.sparsity, updates.values) == (0.8, "int2")
    assert StaleSparse(sparsity=0.99).values == "int2"
