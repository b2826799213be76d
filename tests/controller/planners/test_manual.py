"""docs/planners.md shows every planner, and what it says they answer is what they answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.controller.planners.registry import PLANNERS

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "planners.md").read_text()
SECTIONS = dict(re.findall(r"^## `([a-z-]+)`\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def shortened(value: Any) -> Any:
    """Numbers to the six digits that the manual shows."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-5)
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    return [shortened(each) for each in value] if isinstance(value, list) else value


def test_every_planner_has_a_section_and_nothing_else_has_one() -> None:
    assert sorted(SECTIONS) == sorted(PLANNERS)


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_the_example_in_the_manual_gives_what_the_manual_says(name: str) -> None:
    given, answer = re.findall(r"```json\n(.*?)\n```", SECTIONS[name], re.DOTALL)
    assert json.loads(PLANNERS[name].run_json(given)) == shortened(json.loads(answer))
