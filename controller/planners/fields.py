"""Reading a planner's input: every field checked, every refusal by the field's name, value and next step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from atoll.controller.planners.bounds import Bounds
from atoll.errors import BadInput

MAX_NODES: Final = 100_000
MAX_BATCH: Final = 2**40


def fields(data: Any, where: str, required: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """`data` as an object that has all of `required` and nothing beyond `optional`."""
    if not isinstance(data, dict):
        raise BadInput(f"{where} = {shown(data)} must be an object with {', '.join(sorted(required))}")
    known = required | optional
    prefix = f"{where}." if where else ""
    if unknown := sorted(data.keys() - known):
        raise BadInput(f"unknown field {prefix}{unknown[0]}. Known: {', '.join(sorted(known))}")
    if missing := sorted(required - data.keys()):
        raise BadInput(f"field {prefix}{missing[0]} is missing. Needed: {', '.join(sorted(required))}")
    return data


def shown(value: Any) -> str:
    """A foreign value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def whole(value: Any, where: str, low: int, high: int = MAX_BATCH) -> int:
    if type(value) is not int or not low <= value <= high:
        limit = "2^40" if high == MAX_BATCH else str(high)
        raise BadInput(f"{where} = {shown(value)} must be a whole number of at least {low} and at most {limit}")
    return value


def number(value: Any, where: str, low: float, high: float, unit: str = "") -> float:
    """A number from low to high, both included."""
    found = as_float(value)
    if not low <= found <= high:
        raise BadInput(f"{where} = {shown(value)} must be a number{unit} between {low:g} and {high:g}")
    return found


def seconds(value: Any, where: str) -> float:
    """A time that takes part in ratios, so not 0."""
    if not 1e-12 <= (found := as_float(value)) <= 1e9:
        raise BadInput(f"{where} = {shown(value)} must be a positive number of seconds, between 1e-12 and 1e9")
    return found


def as_float(value: Any) -> float:
    """NaN, which is within no limits, for whatever is not a number (true is none) or is beyond float64."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def choice(value: Any, where: str, names: Mapping[str, Any] | tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in names:
        raise BadInput(f"{where} = {shown(value)} must be one of {', '.join(names)}")
    return value


def items(value: Any, where: str, most: int, least: int = 1) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        size = f"of {len(value)}" if isinstance(value, list) else shown(value)
        count = f"{least}" if least == most else f"{least} to {most}"
        raise BadInput(f"{where} must be a list of {count} entries; it is {size}")
    return value


def nodes(value: Any) -> list[Any]:
    return items(value, "nodes", MAX_NODES)


BOUNDS: Final = frozenset({"min_batch", "max_batch"})


def bounds(data: dict[str, Any], where: str) -> Bounds:
    """From the optional fields min_batch and max_batch."""
    low = whole(data.get("min_batch", 0), f"{where}.min_batch", 0)
    if data.get("max_batch") is None:
        return Bounds(low)
    high = whole(data["max_batch"], f"{where}.max_batch", 0)
    if high < low:
        raise BadInput(f"{where}.max_batch = {high} is less than its min_batch = {low}. Raise one or lower the other")
    return Bounds(low, high)
