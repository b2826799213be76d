"""atoll metrics: the table that people read, the plot, and what other tools get."""

from __future__ import annotations

import csv
import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripted_controller import ScriptedController
from shown_job import atoll
from typer.testing import CliRunner

from atoll.v1 import jobs_pb2 as pb


@pytest.fixture
def reporting(controller: ScriptedController) -> ScriptedController:
    controller.script.add("vit-1")
    steps = range(0, 100, 10)
    for name, values in (("loss", [3 - 0.2 * n for n in range(10)]), ("odd", [math.nan, 1e9, *[math.inf] * 8])):
        controller.script.curves[name] = pb.Curve(
            name=name, steps=steps, values=values, runs=[1] * 10, unix_s=[1.7e9 + step for step in steps]
        )
    return controller


def test_the_table_tells_where_curves_are(runner: CliRunner, reporting: ScriptedController) -> None:
    assert atoll(runner, reporting, "metrics", "vit-1")[1].splitlines() == [
        "NAME  POINTS  STEPS  FIRST  LAST  LEAST  AT   MOST  AT",
        "loss      10  0..90      3   1.2    1.2  90      3   0",
        "odd       10  0..90    nan   inf  1e+09  10  1e+09  10",
    ]


def test_other_tools_get_every_point(runner: CliRunner, reporting: ScriptedController) -> None:
    rows = list(csv.DictReader(atoll(runner, reporting, "metrics", "vit-1", "--csv")[1].splitlines()))
    assert len(rows) == 20
    assert rows[1] == {"name": "loss", "step": "10", "run": "1", "unix_s": "1700000010.000", "value": "2.8"}
    assert math.isnan(float(rows[10]["value"]))
    (curve,) = json.loads(atoll(runner, reporting, "metrics", "vit-1", "odd", "--json")[1])["curves"]
    assert curve["name"] == "odd"
    assert curve["values"] == [None, 1e9, *[None] * 8]
    assert [len(curve[key]) for key in ("steps", "runs", "unix_s")] == [10, 10, 10]


def test_the_plot_has_a_name_and_axes_and_no_colours(runner: CliRunner, reporting: ScriptedController) -> None:
    loss, odd = atoll(runner, reporting, "metrics", "vit-1", "--plot")[1].rsplit("\n", 2)[:2]
    assert "loss" in loss
    assert "3.0" in loss
    assert "90" in loss.splitlines()[-1]
    assert "\x1b" not in loss
    assert odd == "odd: 1 finite points are too few to draw"


def test_a_job_that_reports_nothing_says_how_to(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    code, out, err = atoll(runner, controller, "metrics", "vit-1")
    assert (code, out) == (0, "")
    assert "run.report(loss=loss.item())" in err
    assert json.loads(atoll(runner, controller, "metrics", "vit-1", "--json")[1]) == {"curves": []}


def test_bad_input(runner: CliRunner, reporting: ScriptedController) -> None:
    code, _, err = atoll(runner, reporting, "metrics", "vit-1", "--csv", "--plot")
    assert (code, "exclude each other" in err) == (2, True)
    code, _, err = atoll(runner, reporting, "metrics", "no-such")
    assert (code, "no job" in err) == (2, True)


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is installed: nothing is missing")
def test_event_files_need_a_package(runner: CliRunner, reporting: ScriptedController, tmp_path: Path) -> None:
    code, _, err = atoll(runner, reporting, "metrics", "vit-1", "--tensorboard", str(tmp_path / "events"))
    assert (code, "pip install torch tensorboard" in err) == (2, True)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_event_files_are_written(runner: CliRunner, reporting: ScriptedController, tmp_path: Path) -> None:
    code, _, err = atoll(runner, reporting, "metrics", "vit-1", "--tensorboard", str(tmp_path / "events"))
    assert (code, "20 points" in err) == (0, True)
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))
