"""The base of what is kept in etcd: frozen dataclasses that pydantic reads back strictly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

LATER: Final[Mapping[str, bool]] = MappingProxyType({"later": True})
"""Metadata of a field that came after the first release: where a record lacks it, it has its default."""


class EtcdRecord:
    """A dataclass that may be in etcd, whole or as part of another. Every field but those marked LATER must be there,
    whatever its default in code; unknown ones are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        later = {field.name for field in dataclasses.fields(source) if "later" in field.metadata}
        for field in handler.resolve_ref_schema(schema)["schema"]["fields"]:
            if field["name"] not in later and field["schema"]["type"] == "default":
                field["schema"] = field["schema"]["schema"]
        return schema
