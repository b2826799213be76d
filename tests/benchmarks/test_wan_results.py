"""From what workers told to the tables: what is measured, and what is extrapolated and marked so."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from lab import plot
from lab.cell import CellRecord, Step, Work
from lab.options import Method, Rate
from lab.results import WINDOW, Arrival, FinalLoss, Result, arrival, final_loss, result, steps_to
from lab.tables import tables, unshaped_of, wants_unshaped
from rich.console import Console


def cell(
    *, method: str = "ddp", rate: str = "100", steps: int, step_s: float, first_s: float = 0.0, ended: str = ""
) -> Result:
    """A cell whose loss falls by 0.01 a step from 1.0, asked for 40 steps; the first step takes `first_s` longer."""
    work = Work(
        model="mlp", method=Method.parse(method), workers=2, rate=Rate.parse(rate), rtt_ms=0, steps=40, max_s=60
    )
    told = [
        [Step(first_s + step * step_s, 1.0 - 0.01 * step, 1000 * step, 150) for step in range(1, steps + 1)]
        for _ in range(2)
    ]
    return result(CellRecord(work, told, parameter_bytes=100, ended=ended), repeat=0)


def test_only_steps_that_every_worker_finished_count() -> None:
    work = Work(model="mlp", method=Method.parse("ddp"), workers=2, rate=Rate.parse("100"), rtt_ms=0, steps=9, max_s=9)
    fast = [Step(1.0 * step, 2.0, 100 * step, 150) for step in range(1, 8)]
    slow = [Step(1.5 * step, 4.0, 100 * step, 250) for step in range(1, 6)]
    found = result(CellRecord(work, [fast, slow], parameter_bytes=100), repeat=0)
    assert [(point.at_s, point.loss) for point in found.points] == [(1.5 * step, 3.0) for step in range(1, 6)]
    assert found.step_s == [1.0, 1.0, 1.5, 1.5], "two workers, steps 4 and 5: three are warm-up"
    assert found.sent_bytes_per_step == 100
    assert found.beyond == 2.5


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cell_that_was_ended_early_still_has_a_result(steps: int) -> None:
    found = cell(steps=steps, step_s=2.0, ended="60 s were over")
    assert len(found.points) == steps
    assert len(found.step_s) == (2 if steps == 2 else 0)
    assert found.smooth() == []
    assert arrival(found, None, 0.5) is None
    assert len(tables([found], 0.5)) == 1


@pytest.mark.parametrize(("method", "timed"), [("ddp", 2), ("ddp-powersgd", 0)])
def test_whole_gradients_that_powersgd_sends_at_first_are_no_figure_of_its_own(method: str, timed: int) -> None:
    assert len(cell(method=method, steps=3, step_s=9.0, ended="60 s were over").step_s) == timed
    assert len(cell(method=method, steps=5, step_s=9.0, ended="60 s were over").step_s) == 4


def test_the_loss_is_the_mean_of_ten_iterations() -> None:
    curve = cell(steps=12, step_s=1.0).smooth()
    assert [point.at_s for point in curve] == [10, 11, 12]
    assert curve[0].loss == pytest.approx(1.0 - 0.01 * 5.5)
    assert steps_to(curve, 0.935 + 1e-9) == 11
    assert steps_to(curve, 0.9) is None


def test_a_target_that_was_reached_is_measured() -> None:
    assert arrival(cell(steps=40, step_s=0.5), None, 0.855 + 1e-9) == Arrival(20 - 1, 9.5, extrapolated=False)


def test_a_target_beyond_the_end_of_a_cell_is_extrapolated_from_the_unshaped_run() -> None:
    """Five steps of 9 s were measured, of which the first took 20 s more; the unshaped run needs 19 iterations."""
    thin = cell(steps=5, step_s=9.0, first_s=20.0, ended="60 s were over")
    unshaped = cell(rate="none", steps=40, step_s=0.4)
    found = arrival(thin, unshaped, 0.855 + 1e-9)
    assert found == Arrival(19, 20 + 5 * 9 + 14 * 9, extrapolated=True)
    assert str(found) == "~191.0 s, 19 it"


def test_a_cell_that_did_all_its_steps_and_missed_the_target_never_reaches_it() -> None:
    assert arrival(cell(steps=40, step_s=1.0), cell(rate="none", steps=40, step_s=0.1), 0.1) is None
    late = cell(steps=5, step_s=9.0, ended="60 s were over")
    assert arrival(late, cell(rate="none", steps=40, step_s=0.1), 0.1) is None


def test_the_final_loss_is_of_the_unshaped_run_where_the_cell_was_ended() -> None:
    whole, ended = cell(rate="none", steps=40, step_s=0.4), cell(steps=5, step_s=9.0, ended="60 s were over")
    assert final_loss(ended, None) is None
    assert final_loss(ended, whole) == FinalLoss(whole.smooth()[-1].loss, unshaped=True)
    assert final_loss(whole, whole) == FinalLoss(whole.smooth()[-1].loss, unshaped=False)
    assert (str(final_loss(ended, whole)), str(final_loss(whole, None))) == ("~0.645", "0.645")
    assert len(whole.points) >= WINDOW


def test_only_methods_that_were_ended_ask_for_an_unshaped_run() -> None:
    ended = cell(steps=5, step_s=9.0, ended="60 s were over")
    hook = cell(method="ddp-fp16", steps=5, step_s=5.0, ended="60 s were over")
    floor = cell(method="local", steps=5, step_s=5.0, ended="60 s were over")
    complete = cell(method="stale-sparse", steps=40, step_s=0.3)
    unshaped = cell(rate="none", steps=40, step_s=0.4)
    assert wants_unshaped([ended, hook, floor, complete]) == [ended, hook]
    assert wants_unshaped([ended, hook, floor, complete, unshaped]) == [hook]
    assert unshaped_of(ended, [ended, hook, unshaped]) is unshaped
    assert unshaped_of(hook, [ended, hook, unshaped]) is None


def test_the_table_sets_every_method_beside_the_floor_and_ddp() -> None:
    results = [
        cell(method="local", steps=40, step_s=0.25),
        cell(steps=5, step_s=10.0, ended="60 s were over"),
        cell(method="stale-sparse", steps=40, step_s=0.5),
        cell(rate="none", steps=40, step_s=0.4),
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    found = tables(results, 0.855 + 1e-9)
    console.print(found[0])
    rows = {row.split("│")[1].strip(): row.split("│")[2:-1] for row in console.export_text().splitlines() if "│" in row}
    ddp, sparse = ([column.strip() for column in rows[name]] for name in ("ddp", "stale-sparse"))
    assert ddp[:6] == ["10.000 [10.000-10.000]", "40.00", "0.00", "~190.0 s, 19 it", "~1.0", "~0.645"]
    assert ddp[-1] == "5 (60 s were over)"
    assert sparse[:6] == ["0.500 [0.500-0.500]", "2.00", "0.00", "9.5 s, 19 it", "~20.0", "0.645"]
    assert [str(table.title) for table in found] == ["mlp, 2 workers, 100 Mbit/s", "mlp, 2 workers, unshaped"]


def test_the_figure_is_drawn_with_dashes_where_it_is_extrapolated(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", exc_type=ImportError)
    ended = cell(steps=5, step_s=10.0, ended="60 s were over")
    plot.draw([ended, cell(rate="none", steps=40, step_s=0.4)], {"mlp": 0.8}, tmp_path / "loss.svg")
    dashed = [line for line in (tmp_path / "loss.svg").read_text().splitlines() if "stroke-dasharray" in line]
    assert len(dashed) == 3, "the extrapolated line, and the target in both columns"
