"""atoll simulate."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
SCENARIO = """
name = "tiny"
entries = 1000
total_batch = 30
policies = ["even", "lb-bsp"]
[learning]
samples = 900
[[devices]]
name = "x"
count = 2
q = 0.01
s = 0.0
k = 0.02
m = 0.0
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    return str(path)


def test_a_table_has_a_row_for_each_policy(runner: CliRunner, scenario: str) -> None:
    done = runner.invoke(app, ["simulate", scenario])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["POLICY", "even", "lb-bsp"]


@pytest.mark.parametrize("name", ["cannikin-a", "compressed"])
def test_the_manual_shows_what_it_prints(runner: CliRunner, name: str) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    shown = re.search(rf"^atoll simulate examples/scenarios/{name}\.toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    done = runner.invoke(app, ["simulate", str(ROOT / "examples" / "scenarios" / f"{name}.toml")])
    assert done.stdout == shown[1]


def test_json_is_one_document_the_same_to_the_byte(runner: CliRunner, scenario: str) -> None:
    ask = ["simulate", scenario, "--policy", "optperf", "--seed", "7", "--json"]
    first, second = (runner.invoke(app, ask).stdout for _ in range(2))
    assert first == second
    found = json.loads(first)
    assert (found["scenario"], found["seed"]) == ("tiny", 7)
    assert [each["policy"] for each in found["policies"]] == ["optperf"]
    assert found["policies"][0]["steps"] == 30


def test_presets_and_policies_are_listed(runner: CliRunner) -> None:
    done = runner.invoke(app, ["simulate", "--list-presets"])
    assert done.exit_code == 0
    assert "rtx-4090 with vit-b-16" in done.stdout
    assert "cannikin-b" in done.stdout
    kinds = {
        row["kind"]
        for row in json.loads(runner.invoke(app, ["simulate", "--list-presets", "--json"]).stdout)["presets"]
    }
    assert kinds == {"cluster", "model", "device", "policy"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "which scenario?"),
        (["nowhere.toml"], "scenario nowhere.toml is not there"),
        (["{}", "--policy", "evn"], "no policy 'evn'. Did you mean 'even'?"),
        (["{}", "--seed", "-1"], "--seed"),
    ],
)
def test_a_wrong_question_is_refused(runner: CliRunner, scenario: str, args: list[str], said: str) -> None:
    done = runner.invoke(app, ["simulate", *(scenario if arg == "{}" else arg for arg in args)])
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_field_that_does_not_exist_is_refused_by_its_name(runner: CliRunner, scenario: str) -> None:
    Path(scenario).write_text(SCENARIO + "colour = 1\n")
    done = runner.invoke(app, ["simulate", scenario])
    assert done.exit_code == 2
    assert "unknown field 'devices[0].colour'" in done.stderr


@pytest.mark.parametrize("kind", ["failures", "volunteers"])
def test_a_kind_that_only_benchmarks_simulate_is_refused_with_their_command(
    runner: CliRunner, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "other.toml"
    path.write_text(f'kind = "{kind}"\nmachines = 16\nstep_s = 60\n')
    done = runner.invoke(app, ["simulate", str(path)])
    assert done.exit_code == 2
    assert f"kind = '{kind}' is not simulated here. In a clone: python benchmarks/disruptions.py FILE" in done.stderr
