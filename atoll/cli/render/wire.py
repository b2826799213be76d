"""Protobuf messages as plain JSON values: the shapes that `--json` promises."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, MutableSequence
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


def phase(job: Any) -> str:
    """The job's phase in one lower-case word."""
    return enum_word(job.DESCRIPTOR.fields_by_name["phase"].enum_type, job.phase) or "unknown"


def state(status: Any) -> str:
    """A worker's state in one lower-case word."""
    return enum_word(status.DESCRIPTOR.fields_by_name["state"].enum_type, status.state) or "unknown"


def event_kind(event: Any) -> str:
    """Return an event's kind in lower case."""
    return enum_word(event.DESCRIPTOR.fields_by_name["kind"].enum_type, event.kind) or "unknown"


def level(event: Any) -> str:
    """An event's level in one lower-case word."""
    return enum_word(event.DESCRIPTOR.fields_by_name["level"].enum_type, event.level) or "info"
