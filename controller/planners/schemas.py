"""The declaration of a planner's input: typed values within the process, JSON where people and records have it.

Every refusal names the field, its value and what is right.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from atoll.documents import explain
from atoll.errors import BadInput

MAX_NODES: Final = 100_000
MAX_BATCH: Final = 2**40
MAX_SECONDS: Final = 1e6

Samples = Annotated[int, Field(ge=0, le=MAX_BATCH)]
TotalBatch = Annotated[int, Field(ge=1, le=MAX_BATCH)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Share = Annotated[float, Field(ge=0, le=1)]
Sparsity = Annotated[float, Field(ge=0, le=1 - 1e-9)]
Uncertainty = Annotated[float, Field(ge=0, le=10)]
"""A relative standard deviation."""
Bytes = Annotated[int, Field(ge=1, le=2**60)]
BytesPerSecond = Annotated[float, Field(ge=1, le=1e15)]
Name = Annotated[str, Field(min_length=1, max_length=256)]

Read = TypeVar("Read")


class Schema(BaseModel):
    """No field beyond the declared ones, no number from a text or a truth value.

    What was left out stays out of the record: a recorded input is what was said.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


def read(schema: type[Read], text: str, what: str, example: str) -> Read:
    """JSON text as `schema`. Raises BadInput for the first field that is wrong, and where it is no JSON object.

    what: the document, as its users call it. example: what they may give, in words.
    """
    try:
        value: Read = _adapter(cast(Any, schema)).validate_json(text)
        return value
    except ValidationError as error:
        found = error.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        raise BadInput(f"{what} is not JSON: {found[0]['ctx']['error']}. {example}")
    if not found[0]["loc"] and found[0]["type"] != "value_error":
        raise BadInput(f"{what} must be a JSON object. {example}")
    raise BadInput(explain(schema, found))


def plain(value: object, *, omit_none: bool = False) -> dict[str, Any]:
    """As plain data, under the names that JSON has: of a Schema what was said, of a plan every field."""
    kind: Any = type(value)
    found: dict[str, Any] = _adapter(kind).dump_python(value, by_alias=True, exclude_unset=True, exclude_none=omit_none)
    return found


def canonical(value: object, *, omit_none: bool = False) -> str:
    """JSON with sorted keys and shortest floats: equal values are equal text."""
    return json.dumps(plain(value, omit_none=omit_none), sort_keys=True, allow_nan=False)


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)
