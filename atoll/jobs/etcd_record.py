"""Base class of the records kept in etcd: frozen dataclasses that pydantic reads back strictly."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict


class EtcdRecord:
    """A dataclass that may be in etcd, whole or as part of another.

    Reading refuses an unknown field and a value of another type. A missing field takes its default, if it has one."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )
