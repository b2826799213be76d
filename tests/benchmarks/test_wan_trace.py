"""The bandwidth that links follow."""

from __future__ import annotations

import statistics
from pathlib import Path

import make_trace
import pytest
from lab import trace
from lab.trace import Trace

from atoll.errors import BadInput

STEPS = Trace([0.0, 2.0, 3.0], [100.0, 400.0, 50.0], 4.0)


def test_the_shipped_trace_is_what_its_script_makes() -> None:
    shipped = trace.read(trace.WAN)
    assert list(shipped.mbit_s) == [round(rate, 1) for rate in trace.generate(600, make_trace.SEED)]
    assert shipped.length_s == 600


def test_the_shipped_trace_is_like_the_papers() -> None:
    rates = trace.read(trace.WAN).mbit_s
    assert min(rates) >= 50
    assert max(rates) <= 600
    assert 145 < statistics.fmean(rates) < 160
    assert statistics.pstdev(rates) > 60, "a WAN's bandwidth moves"


@pytest.mark.parametrize("seed", range(5))
def test_every_generated_rate_is_within_bounds(seed: int) -> None:
    rates = trace.generate(2000, seed)
    assert all(trace.LOWEST_MBIT_S <= rate <= trace.HIGHEST_MBIT_S for rate in rates)
    assert rates == trace.generate(2000, seed)


def test_a_rate_holds_until_the_next_point_and_the_trace_begins_again() -> None:
    assert [STEPS.at(now) for now in (0, 1.9, 2, 3.5, 4, 6.5)] == [100, 100, 400, 50, 100, 400]
    assert [STEPS.next_change_s(now) for now in (0, 2, 3, 3.9, 4, 7)] == [2, 3, 4, 4, 6, 8]


def test_the_mean_weighs_points_by_their_time() -> None:
    assert STEPS.mean(0, 4) == pytest.approx((2 * 100 + 400 + 50) / 4)
    assert STEPS.mean(1, 2.5) == pytest.approx((100 + 0.5 * 400) / 1.5)
    assert STEPS.mean(0, 40) == pytest.approx(STEPS.mean(0, 4))
    assert STEPS.scaled(0.2).mean(1, 2.5) == pytest.approx(0.2 * STEPS.mean(1, 2.5))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a line `seconds,mbit_s` and 2 to"),
        ("seconds,mbit_s\n0,100\n", "must be a line `seconds,mbit_s` and 2 to"),
        ("0,100\n1,100\n2,100\n", "must be a line `seconds,mbit_s` and 2 to"),
        ("seconds,mbit_s\n1,100\n2,100\n", "line 2: '1,100' is not a time that ascends from 0"),
        ("seconds,mbit_s\n0,100\n0,100\n", "line 3"),
        ("seconds,mbit_s\n0,100\n1,0\n", "line 3"),
        ("seconds,mbit_s\n0,100\n1,nan\n", "line 3"),
        ("seconds,mbit_s\n0,100\n1\n", "line 3: '1'"),
        ("seconds,mbit_s\n0,100\ninf,100\n", "line 3"),
    ],
)
def test_a_trace_that_cannot_be_followed_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=says):
        trace.read(path)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        trace.read(tmp_path / "none.csv")
