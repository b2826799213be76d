"""Base of planners' inputs: typed values within the process, JSON for people and records.

Every refusal names the field, its value and the range."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Final, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from atoll.errors import BadInput
from atoll.host.documents import adapter, explain

MAX_NODES: Final = 100_000
MAX_BATCH: Final = 2**40
MAX_SECONDS: Final = 1e6

Samples = Annotated[int, Field(ge=0, le=MAX_BATCH)]
TotalBatch = Annotated[int, Field(ge=1, le=MAX_BATCH)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Share = Annotated[float, Field(ge=0, le=1)]
Sparsity = Annotated[float, Field(ge=0, le=1 - 1e-9)]
Uncertainty = Annotated[float, Field(ge=0, le=10)]
"""Relative standard deviation."""
Bytes = Annotated[int, Field(ge=1, le=2**60)]
BytesPerSecond = Annotated[float, Field(ge=1, le=1e15)]
Name = Annotated[str, Field(min_length=1, max_length=256)]

_LEAST_ABOVE: Final = 1e-12
"""Distance from an exclusive bound to the nearest allowed number."""

Read = TypeVar("Read")


class Schema(BaseModel):
    """Base of inputs: no undeclared field, no number from a text or a boolean.

    A field that was left out stays out of the record: a recorded input is exactly what was given."""

    # Built when first used: a process uses few of the planners that it imports.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    @classmethod
    def of_measured(cls, **values: Any) -> Self:
        """Make an instance of measured values: a number outside its field's range becomes the nearest one inside.

        A planner that refused a measurement would decide nothing as long as it lasts. People's input is refused instead
        (`read`). Raises BadInput if the values contradict each other."""
        ranges = _ranges_of(cls)
        inside = {name: _nearest(value, ranges[name]) if name in ranges else value for name, value in values.items()}
        try:
            return cls(**inside)
        except ValidationError as error:
            flaw = explain(cls, error.errors(include_url=False))
            raise BadInput(f"no {cls.__name__} can be made of what was measured: {flaw}") from error


def read(schema: type[Read], text: str, what: str, example: str) -> Read:
    """Parse JSON text as `schema`. Raises BadInput for the first wrong field, and if the text is no JSON object.

    what: the document's name for users. example: a valid document, in words."""
    try:
        value: Read = adapter(cast(Any, schema)).validate_json(text)
        return value
    except ValidationError as error:
        found = error.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        raise BadInput(f"{what} is not JSON: {found[0]['ctx']['error']}. {example}")
    if not found[0]["loc"] and found[0]["type"] != "value_error":
        raise BadInput(f"{what} must be a JSON object. {example}")
    raise BadInput(explain(schema, found))


def plain(value: object, *, omit_none: bool = False) -> dict[str, Any]:
    """Return plain data: of a Schema the fields that were given, of a plan every field."""
    kind: Any = type(value)
    found: dict[str, Any] = adapter(kind).dump_python(value, exclude_unset=True, exclude_none=omit_none)
    return found


def canonical(value: object, *, omit_none: bool = False) -> str:
    """Return JSON with sorted keys and shortest floats: equal values are equal text."""
    return json.dumps(plain(value, omit_none=omit_none), sort_keys=True, allow_nan=False)


@cache
def _ranges_of(schema: type[BaseModel]) -> Mapping[str, tuple[float, float]]:
    """Return the least and the largest number that each field allows, in itself or in each value of a tuple."""
    ranges = {}
    for name, field in schema.model_fields.items():
        if limits := list(_limits([*field.metadata, field.annotation])):
            lows = [one for one, is_least in limits if is_least]
            highs = [one for one, is_least in limits if not is_least]
            ranges[name] = max(lows, default=-math.inf), min(highs, default=math.inf)
    return ranges


def _limits(declared: Any) -> Iterator[tuple[float, bool]]:
    """Yield each bound of the numbers in an annotation, and whether it is a lower one."""
    for one in declared:
        if isinstance(one, FieldInfo):
            yield from _limits(one.metadata)
        elif (bound := getattr(one, "ge", None)) is not None:
            yield bound, True
        elif (bound := getattr(one, "gt", None)) is not None:
            yield bound + _LEAST_ABOVE, True
        elif (bound := getattr(one, "le", None)) is not None:
            yield bound, False
        elif not isinstance(one, type):
            yield from _limits(get_args(one))


def _nearest(value: Any, within: tuple[float, float]) -> Any:
    if isinstance(value, tuple):
        return tuple(_nearest(one, within) for one in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return min(max(value, within[0]), within[1])
