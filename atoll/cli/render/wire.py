"""Protobuf messages as plain JSON values: the shapes that `--json` promises."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, MutableSequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from google.protobuf.descriptor import EnumDescriptor
    from google.protobuf.message import Message

_JSON_TEXT: Final = frozenset({"strategy_settings", "strategy_params"})
"""Fields that travel as JSON: shown as what they are."""


def to_plain(message: Message) -> dict[str, Any]:
    """Every field under its proto name: enums in lower case, integers as numbers, what is not set as null.

    Unlike protobuf's own JSON, where 64-bit integers are strings and NaN is one too (here: null).
    """
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        return {str(key): _value(item, None) for key, item in sorted(value.items())}
    if isinstance(value, MutableSequence):
        return [_value(item, field.enum_type) for item in value]
    if field.name in _JSON_TEXT:
        return json.loads(value or "{}")
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field.enum_type)


def _value(value: Any, enum: EnumDescriptor | None) -> Any:
    if enum is not None:
        return enum_word(enum, value)
    if hasattr(value, "DESCRIPTOR"):
        return to_plain(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def enum_word(enum: EnumDescriptor, number: int) -> str | None:
    """PHASE_RUNNING -> 'running'; None for the unspecified one; the number where it is of a newer version."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    word = known.name.removeprefix(prefix).lower()
    return None if word == "unspecified" else word


def _word(message: Any, *, field: str, unset: str = "unknown") -> str:
    """Return a field's value in one lower-case word."""
    return enum_word(message.DESCRIPTOR.fields_by_name[field].enum_type, getattr(message, field)) or unset


phase = partial(_word, field="phase")  # of a job
state = partial(_word, field="state")  # of a worker
event_kind = partial(_word, field="kind")
level = partial(_word, field="level", unset="info")  # of an event
