from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import SettingError
from atoll.strategies.settings import MAX_RATE, Dense, StaleSparse, from_name, from_spec
from atoll.v1 import common_pb2 as pb


def test_names() -> None:
    assert from_name("dense") == Dense()
    assert from_name("stale-sparse") == StaleSparse()
    with pytest.raises(SettingError, match="strategy = 'ring' is not known. Use one of dense, stale-sparse"):
        from_name("ring")


def test_a_spec_says_all_or_leaves_it_to_the_defaults() -> None:
    assert from_spec(pb.JobSpec()) == Dense()
    assert from_spec(pb.JobSpec(strategy="stale-sparse")) == StaleSparse()
    wire = pb.StaleSparse(
        rate=0.0,
        staleness=0,
        selection="random",
        values="float32",
        no_error_feedback=True,
        momentum="as-is",
        scheduling="fcfs",
        digest_every=7,
        exchange="gradients",
    )
    assert from_spec(pb.JobSpec(strategy="stale-sparse", stale_sparse=wire)) == StaleSparse(
        rate=0.0,
        staleness=0,
        selection="random",
        values="float32",
        error_feedback=False,
        momentum="as-is",
        scheduling="fcfs",
        digest_every=7,
        exchange="gradients",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 1.0}, f"rate = 1.0 must be 0 to {MAX_RATE}"),
        ({"rate": -0.1}, "rate = -0.1"),
        ({"rate": float("nan")}, "rate = nan"),
        ({"staleness": 2}, "staleness = 2 must be 0 or 1"),
        ({"selection": "some"}, "selection = 'some' is not known. Use one of threshold, topk, random"),
        ({"values": "int8"}, "values = 'int8'"),
        ({"momentum": "none"}, "momentum = 'none'"),
        ({"scheduling": "lifo"}, "scheduling = 'lifo'"),
        ({"exchange": "weights"}, "exchange = 'weights' is not known. Use one of updates, gradients"),
        ({"error_feedback": False}, 'error_feedback = False has no meaning with exchange = "updates"'),
        ({"digest_every": 0}, "digest_every = 0 must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        StaleSparse(**settings)
