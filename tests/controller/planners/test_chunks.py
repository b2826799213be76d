from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput


def plan(**changes: Any) -> Any:
    data = {
        "idle_spans": [0.1, 0.1, 0.1],
        "checkpoint_bytes": 1000,
        "replicas": 2,
        "buffers": 4,
        "buffer_bytes": 800,
        "bandwidth": 10_000,
        "alpha": 0.01,
        "mu": 0.9,
    }
    return json.loads(PLANNERS["chunks"].run_json(json.dumps(data | changes)))


INPUTS = st.fixed_dictionaries(
    {
        "idle_spans": st.lists(st.floats(0, 2), min_size=1, max_size=12),
        "checkpoint_bytes": st.integers(1, 5000),
        "replicas": st.integers(1, 4),
        "buffers": st.integers(1, 4),
        "buffer_bytes": st.integers(160, 12_000),
        "bandwidth": st.floats(10, 1e6),
        "alpha": st.floats(0, 0.5),
        "mu": st.floats(0.01, 1),
    }
)


@given(INPUTS)
@settings(deadline=None)
def test_chunks_fit_their_spans_and_buffers_and_cover_every_replica_once(data: dict[str, Any]) -> None:
    found = plan(**data)
    spans, mu, alpha, bandwidth = data["idle_spans"], data["mu"], data["alpha"], data["bandwidth"]
    part, replicas, size = data["buffer_bytes"] // data["buffers"], data["replicas"], data["checkpoint_bytes"]
    chunks = found["chunks"]
    at = dict.fromkeys(range(replicas - 1), 0)
    for chunk in chunks:
        assert 0 < chunk["bytes"] <= part
        assert chunk["offset"] == at[chunk["replica"]]
        at[chunk["replica"]] += chunk["bytes"]
    assert all(end == size for end in at.values())
    order = [(chunk["replica"], chunk["span"]) for chunk in chunks]
    assert order == sorted(order)
    assert [span for _, span in order] == sorted(span for _, span in order)
    used_s = [sum(alpha + c["bytes"] / bandwidth for c in chunks if c["span"] == i) for i in range(len(spans))]
    for used, idle in zip(used_s[:-1], spans[:-1], strict=True):
        assert used <= mu * idle * (1 + 1e-9)
    beyond_s = used_s[-1] - mu * spans[-1]
    assert found["overflow_s"] == pytest.approx(max(0.0, beyond_s), rel=1e-6, abs=1e-9)
    assert found["fits"] == (found["overflow_s"] == 0)


@given(st.lists(st.floats(0.02, 2), min_size=2, max_size=8), st.integers(100, 4000), st.floats(0, 0.01))
def test_no_span_is_left_with_room_for_another_byte_while_something_waits(
    spans: list[float], size: int, alpha: float
) -> None:
    found = plan(idle_spans=spans, checkpoint_bytes=size, alpha=alpha, mu=0.9)
    for i in range(max(chunk["span"] for chunk in found["chunks"])):
        used_s = sum(alpha + c["bytes"] / 10_000 for c in found["chunks"] if c["span"] == i)
        assert 0.9 * spans[i] - used_s < alpha + 1.001 / 10_000


def test_a_span_shrinks_by_what_was_placed_in_it() -> None:
    """0.09 s hold two chunks of 200 bytes (0.03 s each) and one of 200; then the span is full."""
    found = plan()
    assert [(c["span"], c["bytes"]) for c in found["chunks"]] == [(0, 200), (0, 200), (0, 200), (1, 200), (1, 200)]
    assert found["fits"]


def test_a_span_too_short_for_any_chunk_is_passed_over() -> None:
    found = plan(idle_spans=[0.01, 0.0, 1.0])
    assert {chunk["span"] for chunk in found["chunks"]} == {2}


def test_what_does_not_fit_goes_into_the_last_span_and_says_by_how_much() -> None:
    found = plan(idle_spans=[0.1, 0.05], checkpoint_bytes=2000)
    last = [chunk["bytes"] for chunk in found["chunks"] if chunk["span"] == 1]
    assert not found["fits"]
    assert found["overflow_s"] == pytest.approx(len(last) * 0.01 + sum(last) / 10_000 - 0.045)


def test_all_replicas_but_the_machines_own_are_sent() -> None:
    assert plan(replicas=1) == {"chunks": [], "fits": True, "overflow_s": 0.0}
    assert {chunk["replica"] for chunk in plan(replicas=3)["chunks"]} == {0, 1}


def test_what_fits_to_the_byte_is_not_cut_for_an_error_of_rounding() -> None:
    found = plan(idle_spans=[0.03 * n for n in (1, 3, 7)], checkpoint_bytes=2200, mu=1)
    assert [chunk["bytes"] for chunk in found["chunks"]] == [200] * 11
    assert found["fits"]


def test_buffers_without_a_byte_and_chunks_without_number_are_refused() -> None:
    with pytest.raises(BadInput, match="buffer_bytes = 3 gives 4 buffers no byte each"):
        plan(buffer_bytes=3)
    with pytest.raises(BadInput, match="makes 1000000000000 chunks of the checkpoint; at most 1000000"):
        plan(buffer_bytes=4, checkpoint_bytes=10**12)
