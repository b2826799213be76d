"""Writes records to etcd as JSON, and reads them back strictly.

etcd may hold what an older or newer Atoll wrote, so reading refuses unknown and missing fields and names the key. Only
fields marked `later` may be missing: they have their default then.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from atoll.controller.state.records import AdmissionRecord, EventRecord, JobRecord, NodeRecord, PlanRecord, RunRecord
from atoll.controller.state.recovery import CommitRecord
from atoll.errors import BadInput

Record = TypeVar("Record", JobRecord, RunRecord, PlanRecord, AdmissionRecord, NodeRecord, EventRecord, CommitRecord)


def encode(
    record: JobRecord | RunRecord | PlanRecord | AdmissionRecord | NodeRecord | EventRecord | CommitRecord,
) -> bytes:
    """JSON with sorted keys: equal records are equal bytes."""
    return json.dumps(_plain(record), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode(kind: type[Record], key: str, value: bytes) -> Record:
    """The record at `key`. Raises BadInput naming the key and the field that does not fit."""
    try:
        data = json.loads(value)
    except ValueError as error:
        raise BadInput(f"etcd key {key} does not hold JSON: {error}. Remove it, or restore a backup of etcd") from error
    record = _read(kind, data, key, "")
    assert isinstance(record, kind)
    return record


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


@cache
def _later_fields(kind: type) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(kind) if "later" in f.metadata)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, data: Any, key: str, path: str) -> Any:
    """`data` as `kind`; `path` is where it lies inside the record, for messages."""
    origin = typing.get_origin(kind)
    if origin is types.UnionType:  # only X | None is used here
        inner = next(k for k in typing.get_args(kind) if k is not type(None))
        return None if data is None else _read(inner, data, key, path)
    if origin is tuple and isinstance(data, list):
        (item,) = (k for k in typing.get_args(kind) if k is not Ellipsis)
        return tuple(_read(item, value, key, f"{path}[{i}]") for i, value in enumerate(data))
    if origin is Mapping and isinstance(data, dict):
        _, item = typing.get_args(kind)
        return {name: _read(item, value, key, f"{path}[{name!r}]") for name, value in data.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(data, dict):
        return _read_fields(kind, data, key, path)
    if isinstance(kind, type) and _fits(kind, data):
        return float(data) if kind is float else kind(data)
    raise BadInput(f"etcd key {key}: {path.lstrip('.') or 'value'} = {data!r} does not fit. {_OTHER_VERSION}")


def _read_fields(kind: type, data: dict[str, Any], key: str, path: str) -> Any:
    hints = _hints(kind)
    unknown = sorted(data.keys() - hints.keys())
    missing = sorted(hints.keys() - data.keys() - _later_fields(kind))
    if unknown or missing:
        wrong = f"unknown field {path.lstrip('.')}.{unknown[0]}" if unknown else f"field {path}.{missing[0]} is missing"
        raise BadInput(f"etcd key {key}: {wrong.replace(' .', ' ')}. {_OTHER_VERSION}")
    return kind(**{name: _read(hints[name], value, key, f"{path}.{name}") for name, value in data.items()})


def _fits(kind: type, data: Any) -> bool:
    if issubclass(kind, StrEnum):
        return isinstance(data, str) and data in kind.__members__
    if kind is float:
        return isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data)
    return type(data) is kind


_OTHER_VERSION = "Another version of Atoll wrote it: run that one, or remove the key"
