"""Links of a cluster over simulated time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from atoll.controller.simulator.cluster import Link, read_trace
from atoll.errors import BadInput

MBIT = 125_000.0


def test_a_constant_link_takes_its_bytes_over_its_rate() -> None:
    assert Link.constant(8).ends_s(2.5, 3e6) == pytest.approx(5.5)
    assert Link.constant(8).at_mbit_s(1e9) == 8


def test_bytes_go_through_at_the_rate_of_each_second_they_need_and_the_trace_begins_again() -> None:
    link = Link((0.0, 1.0), (8.0, 16.0), 2.0)
    assert [link.at_mbit_s(now) for now in (0, 0.99, 1, 1.99, 2, 3.5)] == [8, 8, 16, 16, 8, 16]
    assert link.ends_s(0.5, 1.5e6) == pytest.approx(1.5)  # 0.5 MB until 1 s, 1 MB in half a second
    assert link.ends_s(0.5, 0.5e6 + 2e6 + 1e6 + 1e6) == pytest.approx(3.5)  # past the end, once around


def test_a_transfer_over_many_rounds_ends_where_its_parts_would() -> None:
    link = Link((0.0, 0.7, 1.3), (5.0, 50.0, 1.0), 2.9)
    whole = link.ends_s(0.3, 40e6)
    now = 0.3
    for _ in range(40):
        now = link.ends_s(now, 1e6)
    assert now == pytest.approx(whole, rel=1e-12)
    assert math.isfinite(whole)


def test_a_trace_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "wan.csv"
    path.write_text("seconds,mbit_s\n0,100\n2,50\n")
    assert read_trace(path) == Link((0.0, 2.0), (100.0, 50.0), 4.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time,rate\n0,1\n1,2\n", "must be a line `seconds,mbit_s`"),
        ("seconds,mbit_s\n0,1\n", "2 to"),
        ("seconds,mbit_s\n1,1\n2,1\n", "line 2: '1,1'"),
        ("seconds,mbit_s\n0,1\n0,1\n", "line 3: '0,1'"),
        ("seconds,mbit_s\n0,1\n1,nan\n", "line 3: '1,nan'"),
        ("seconds,mbit_s\n0,1\n1,0\n", "line 3: '1,0'"),
        ("seconds,mbit_s\n0,1\n1\n", "line 3: '1'"),
    ],
)
def test_a_wrong_trace_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wan.csv"
    path.write_text(text)
    with pytest.raises(BadInput) as refused:
        read_trace(path)
    assert said in str(refused.value)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_trace(tmp_path / "nowhere.csv")
