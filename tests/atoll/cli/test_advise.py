"""atoll advise, as a user runs it: real workers of a real script. And what it refuses before it starts any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.cli.main import app

SCRIPT = str(Path(__file__).parent / "scripts/advised.py")
BY_HAND = ("--bandwidth", "10M", "--rtt", "40ms", "--workers", "4")
ENGINES = {"groups", "volunteer"}


def advised(runner: CliRunner, model: str) -> dict[str, Any]:
    environment = {"MODEL": model, "CUDA_VISIBLE_DEVICES": ""}
    found = runner.invoke(app, ["advise", SCRIPT, *BY_HAND, "--json"], env=environment)
    assert found.exit_code == 0, found.stderr
    advice: dict[str, Any] = json.loads(found.stdout)
    return advice


def refused(advice: dict[str, Any]) -> set[str]:
    return {one["name"] for one in advice["strategies"] if one["refused"]}


def test_a_model_is_measured_and_each_strategy_predicted(runner: CliRunner) -> None:
    """Its steps of 5 samples and of 2 are timed; of 4 workers on 2 islands each has 5 of the script's 20."""
    advice = advised(runner, "mlp")
    script = advice["script"]
    assert (script["entries"], script["tensors"], script["batch"]) == (32 * 64 + 64 + 64 * 8 + 8, 4, 20)
    assert [one["samples"] for one in script["timed"]] == [2, 5]
    assert all(0 < one["compute_s"] < 5 and one["peak_bytes"] > 1 << 20 for one in script["timed"])
    assert (advice["islands"], sum(advice["samples"])) == ({"island-1": 2, "island-2": 2}, 20)
    assert refused(advice) == {*ENGINES, "zen"}
    compared = [one for one in advice["strategies"] if not one["refused"]]
    assert compared[0]["relative_time"] == 1.0
    assert [one["relative_time"] for one in compared] == sorted(one["relative_time"] for one in compared)
    dense = next(one for one in compared if one["name"] == "dense")
    assert dense["step_s"] > 3 * 0.04  # a ring of four ranks: three round trips at the least
    assert dense["bytes"] == pytest.approx(2 * 3 / 4 * 4 * script["entries"])


def test_sparse_gradients_leave_zen_alone(runner: CliRunner) -> None:
    """Five samples of four words each reach at most 20 of 4,000 rows."""
    advice = advised(runner, "words")
    assert advice["chosen"] == "zen"
    assert len([one for one in advice["strategies"] if not one["refused"]]) == 1
    table, rest = 4000 * 8, 8 * 8 + 8
    assert rest / (table + rest) < advice["script"]["gradient_density"] <= (20 * 8 + rest) / (table + rest)


def test_a_pipeline_is_told_which_strategies_it_may_have(runner: CliRunner) -> None:
    advice = advised(runner, "pipeline")
    why = {one["name"]: one["refused"] for one in advice["strategies"]}
    assert (advice["chosen"], advice["samples"]) == ("", [])
    assert all("cannot be compared" in why[name] for name in ENGINES)
    assert "needs a strategy with an engine of its own" in why["dense"]


@pytest.mark.parametrize(
    ("content", "options", "code", "says"),
    [
        ("import torch.distributed", BY_HAND, 2, "does not import atoll"),
        ("import atoll\nraise ValueError('no data')", BY_HAND, 1, "ended with exit code 1"),
        ("import atoll\nprint('done')", BY_HAND, 2, "ended without run.prepare"),
        ("import atoll", ("--bandwidth", "fast"), 2, "--bandwidth 'fast' is no bandwidth"),
        ("import atoll", ("--bandwidth", "1G", "--rtt", "far"), 2, "--rtt 'far' is no time"),
        ("import atoll", ("--workers", "1"), 2, "one alone exchanges nothing"),
        ("import atoll", ("--islands", "2"), 2, "--islands needs the --bandwidth"),
        ("import atoll", (*BY_HAND, "--islands", "5"), 2, "--islands 5 must be 1 to the number of workers, 4"),
        ("import atoll", ("--controller", "127.0.0.1:1", "--timeout", "0.3"), 3, "no leading controller"),
    ],
)
def test_what_cannot_be_advised_is_one_line(
    runner: CliRunner, content: str, options: tuple[str, ...], code: int, says: str
) -> None:
    Path("train.py").write_text(content)
    found = runner.invoke(app, ["advise", "train.py", *options])
    assert found.exit_code == code, found.stderr
    assert found.stderr.splitlines()[-1].startswith("error: ")
    assert says in found.stderr.splitlines()[-1]


def test_a_missing_script_and_a_cluster_without_devices_are_named(
    runner: CliRunner, controller: ScriptedController
) -> None:
    missing = runner.invoke(app, ["advise", "none.py", *BY_HAND])
    assert (missing.exit_code, missing.stderr) == (2, "error: script none.py is not there. Check the path\n")
    Path("train.py").write_text("import atoll")
    empty = runner.invoke(app, ["advise", "train.py", "--controller", controller.address])
    assert empty.exit_code == 2
    assert "the controller has no connected device" in empty.stderr
