"""Planners by name, and their JSON form: text in, text out, the same bytes for the same input.

This is what `atoll plan NAME` runs, and what the controller runs and records: a recorded input gives its output again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from atoll.controller.planners.bounds import Bounds
from atoll.controller.planners.even import EvenInput, split_evenly
from atoll.controller.planners.inverse_time import InverseTimeInput, split_by_inverse_time
from atoll.errors import BadInput

MAX_NODES: Final = 100_000
MAX_BATCH: Final = 2**40


@dataclass(frozen=True, slots=True)
class Planner:
    """One planner. `example` is a valid input, shown by `atoll plan`."""

    name: str
    summary: str
    example: str
    plan: Callable[[dict[str, Any]], dict[str, Any]]

    def run_json(self, text: str) -> str:
        """Plan from JSON to JSON (sorted keys, no line break). Raises BadInput naming the field, or NoFeasiblePlan."""
        try:
            data = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"the input of planner {self.name} is not JSON: {error}. Example: {self.example}") from error
        if not isinstance(data, dict):
            raise BadInput(f"the input of planner {self.name} must be a JSON object. Example: {self.example}")
        return canonical(self.plan(data))


def canonical(data: Mapping[str, Any]) -> str:
    """JSON with sorted keys and shortest floats: equal data is equal text."""
    return json.dumps(data, sort_keys=True, allow_nan=False)


def _no_constant(name: str) -> float:
    raise BadInput(f"{name} is not a number that can be planned with. Give finite numbers")


def _fields(data: Any, where: str, required: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BadInput(f"{where} = {data!r} must be an object with {', '.join(sorted(required))}")
    known = required | optional
    prefix = f"{where}." if where else ""
    if unknown := sorted(data.keys() - known):
        raise BadInput(f"unknown field {prefix}{unknown[0]}. Known: {', '.join(sorted(known))}")
    if missing := sorted(required - data.keys()):
        raise BadInput(f"field {prefix}{missing[0]} is missing. Needed: {', '.join(sorted(required))}")
    return data


def _whole(value: Any, where: str, low: int) -> int:
    if type(value) is not int or not low <= value <= MAX_BATCH:
        raise BadInput(f"{where} = {value!r} must be a whole number of at least {low} and at most 2^40")
    return value


def _seconds(value: Any, where: str) -> float:
    number = float(value) if type(value) in (int, float) else math.nan
    if not 1e-12 <= number <= 1e9:
        raise BadInput(f"{where} = {value!r} must be a positive number of seconds, between 1e-12 and 1e9")
    return number


def _bounds(data: dict[str, Any], where: str) -> Bounds:
    low = _whole(data.get("min_batch", 0), f"{where}.min_batch", 0)
    if data.get("max_batch") is None:
        return Bounds(low)
    high = _whole(data["max_batch"], f"{where}.max_batch", 0)
    if high < low:
        raise BadInput(f"{where}.max_batch = {high} is less than its min_batch = {low}. Raise one or lower the other")
    return Bounds(low, high)


def _nodes(value: Any) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_NODES:
        raise BadInput(f"nodes must be a list of 1 to {MAX_NODES} nodes")
    return value


def _even(data: dict[str, Any]) -> dict[str, Any]:
    _fields(data, "", {"total_batch", "nodes"})
    total = _whole(data["total_batch"], "total_batch", 1)
    nodes: Any = data["nodes"]
    if type(nodes) is int:
        nodes = [{}] * min(_whole(nodes, "nodes", 1), MAX_NODES + 1)
    bounds = []
    for i, node in enumerate(_nodes(nodes)):
        where = f"nodes[{i}]"
        bounds.append(_bounds(_fields(node, where, set(), frozenset({"min_batch", "max_batch"})), where))
    return asdict(split_evenly(EvenInput(total, tuple(bounds))))


def _inverse_time(data: dict[str, Any]) -> dict[str, Any]:
    _fields(data, "", {"total_batch", "nodes"})
    total = _whole(data["total_batch"], "total_batch", 1)
    times, bounds = [], []
    for i, given in enumerate(_nodes(data["nodes"])):
        where = f"nodes[{i}]"
        node = _fields(given, where, {"seconds_per_sample"}, frozenset({"min_batch", "max_batch"}))
        times.append(_seconds(node["seconds_per_sample"], f"{where}.seconds_per_sample"))
        bounds.append(_bounds(node, where))
    return asdict(split_by_inverse_time(InverseTimeInput(total, tuple(times), tuple(bounds))))


PLANNERS: Final[Mapping[str, Planner]] = {
    planner.name: planner
    for planner in (
        Planner(
            "even",
            "the same batch for every node, within bounds",
            '{"total_batch": 256, "nodes": 3}',
            _even,
        ),
        Planner(
            "inverse-time",
            "batches in inverse proportion to each node's time per sample",
            '{"total_batch": 256, "nodes": [{"seconds_per_sample": 0.001}, {"seconds_per_sample": 0.002}]}',
            _inverse_time,
        ),
    )
}
