"""What holds for every planner's JSON form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from atoll.controller.planners.registry import PLANNERS
from atoll.errors import AtollError, BadInput

NAMES = sorted(PLANNERS)
MUST_SAY = {"gns": "noise_scale", "admission": "verdicts", "placement": "holders", "chunks": "chunks"}
MUST_SAY |= {
    "compression": "options",
    "fusion": "groups",
    "tensor-groups": "sizes",
    "stages": "cuts",
    "groups": "iterations",
    "sparse-scheme": "costs",
    "exchange-density": "held_by",
    "one-island": "sooner",
    "thin-island": "leaves",
    "allocation": "order_cost",
    "islands": "islands",
    "strategy": "reason",
}
SENSELESS = [None, True, -1, 1e999, 10**400, "1", [], {}, [[]], [None], {"a": 1}, 0.5]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_each_planner_runs(name: str) -> None:
    assert MUST_SAY.get(name, "batches") in json.loads(PLANNERS[name].run_json(PLANNERS[name].example))


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_input_gives_the_same_bytes_again(name: str) -> None:
    planner = PLANNERS[name]
    spaced = json.dumps(json.loads(planner.example), indent=3, sort_keys=True)
    assert planner.run_json(planner.example) == planner.run_json(spaced)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_and_missing_fields_are_refused_by_name(name: str) -> None:
    example = json.loads(PLANNERS[name].example)
    with pytest.raises(BadInput, match="unknown field 'speling'"):
        PLANNERS[name].run_json(json.dumps(example | {"speling": 1}))
    for field in example:
        with pytest.raises(BadInput, match=f"field '{field}' is missing"):
            PLANNERS[name].run_json(json.dumps({key: value for key, value in example.items() if key != field}))


def places(data: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Every value in the example: its path as messages write it, the object or list it is in, and its key there."""
    if isinstance(data, dict):
        keys = [(f"{where}.{key}".lstrip("."), key) for key in data]
    else:
        keys = [(f"{where}[{i}]", i) for i in range(len(data))] if isinstance(data, list) else []
    return [place for path, key in keys for place in [(path, data, key), *places(data[key], path)]]


@pytest.mark.parametrize("name", NAMES)
def test_no_senseless_value_anywhere_breaks_a_planner(name: str) -> None:
    """It plans, or says in one of Atoll's errors what is wrong: refusals name the field or the list it is in."""
    refused, unnamed = 0, []
    for path, parent, key in places(data := json.loads(PLANNERS[name].example)):
        kept = parent[key]
        for value in SENSELESS:
            parent[key] = value
            try:
                PLANNERS[name].run_json(json.dumps(data).replace("Infinity", "1e999"))
            except AtollError as error:
                refused += 1
                said = str(error)
                named = not isinstance(error, BadInput) or re.split(r"[.\[]", path)[0] in said
                unnamed += [] if named else [(path, value, said)]
        parent[key] = kept
    assert not unnamed
    assert refused > len(SENSELESS)


@pytest.mark.parametrize("name", ["optperf", "goodput", "admission"])
def test_fields_within_nodes_are_refused_by_their_place(name: str) -> None:
    data = json.loads(PLANNERS[name].example)
    data["nodes"][1]["speed"] = 2
    with pytest.raises(BadInput, match=r"unknown field 'nodes\[1\].speed'"):
        PLANNERS[name].run_json(json.dumps(data))
    del data["nodes"][1]["speed"]
    data["nodes"][1]["q"] = data["nodes"][1]["k"] = 0
    with pytest.raises(BadInput, match=r"nodes\[1\] has q \+ k = 0, must be at least 6e-18 seconds"):
        PLANNERS[name].run_json(json.dumps(data))
