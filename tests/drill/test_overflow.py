"""An overflow is planned by step, ahead of all ranks: whoever trains that step, and how often, does the same."""

from __future__ import annotations

import json
from pathlib import Path

from drill import overflow
from drill.overflow import Overflows


def trained(out: Path, run: int, rank: int, last: int, torn: str = "") -> None:
    lines = [
        json.dumps({"step": step, "epoch": 0, "ids": [], "weights": "00", "at": 0.0})
        for step in range(last - 2, last + 1)
    ]
    (out / f"run-{run:06d}-rank-{rank:04d}.jsonl").write_text("\n".join(lines) + "\n" + torn)


def test_it_comes_two_seconds_after_the_newest_step_of_any_rank(tmp_path: Path) -> None:
    trained(tmp_path, 1, 0, 700)
    trained(tmp_path, 2, 0, 41)
    trained(tmp_path, 2, 1, 702, torn='{"step": 9999')
    assert overflow.strike(tmp_path, 1, step_s=0.1) == 722


def test_nothing_is_planned_where_nothing_was_trained(tmp_path: Path) -> None:
    (tmp_path / "run-000001-rank-0000.jsonl").write_text('{"step": 1')
    assert overflow.strike(tmp_path, 0, step_s=0.1) is None
    assert not Overflows(tmp_path).due(20, 0)


def test_that_rank_alone_overflows_at_that_step_each_time_and_in_the_undisturbed_run(tmp_path: Path) -> None:
    out, calm = tmp_path / "out", tmp_path / "calm"
    out.mkdir()
    calm.mkdir()
    trained(out, 1, 0, 10)
    mine = Overflows(out)
    assert not mine.due(30, 1)
    overflow.strike(out, 1, step_s=0.1)
    assert [mine.due(step, rank) for step, rank in ((30, 1), (30, 0), (29, 1), (30, 1))] == [True, False, False, True]
    trained(out, 1, 0, 50)
    overflow.strike(out, 0, step_s=0.1)
    assert mine.due(70, 0)
    overflow.repeat(out, calm)
    assert [Overflows(calm).due(*planned) for planned in ((30, 1), (70, 0), (70, 1))] == [True, True, False]
