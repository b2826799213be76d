"""Tables of failures and volunteers in simulated time."""

from __future__ import annotations

import re
from pathlib import Path

import disruptions
import pytest

from atoll.errors import BadInput

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"


@pytest.mark.parametrize("name", ["failures", "volunteers"])
def test_the_manual_shows_what_it_prints(name: str) -> None:
    command = f"python benchmarks/disruptions.py benchmarks/scenarios/{name}.toml"
    shown = re.search(rf"^{re.escape(command)}\n(.*?)\n```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    (path,) = [path for path in disruptions.SCENARIOS if path.stem == name]
    assert disruptions.table(path) == shown[1]


def test_policy_and_seed_override_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "failures.toml"
    path.write_text('kind = "failures"\nmachines = 16\nstep_s = 60\npolicies = ["memory"]\n')
    heading, row = disruptions.table(path, ["storage-seldom"], 3).splitlines()
    assert heading.split()[:2] == ["POLICY", "EFFECTIVE"]
    assert row.split()[0] == "storage-seldom"
    assert row != disruptions.table(path, ["storage-seldom"], 4).splitlines()[1]


def test_a_scenario_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text("total_batch = 30\n")
    with pytest.raises(BadInput, match="kind = None is wrong. Use one of failures, volunteers"):
        disruptions.table(path)
