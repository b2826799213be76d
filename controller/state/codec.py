"""Writes records to etcd as JSON, and reads them back strictly.

etcd may hold a record of another version of Atoll. Reading refuses a field that it does not know and names the key.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar, cast

from pydantic import ValidationError

from atoll.errors import BadInput, SettingError
from atoll.host.documents import adapter
from atoll.jobs.etcd_record import EtcdRecord

Record = TypeVar("Record", bound=EtcdRecord)

_OTHER_VERSION: Final = "Another version of Atoll wrote it: run that one, or remove the key"


def encode(record: EtcdRecord) -> bytes:
    """Return JSON with sorted keys: equal records give equal bytes."""
    plain = adapter(cast(Any, type(record))).dump_python(record, mode="json")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode(kind: type[Record], key: str, value: bytes) -> Record:
    """Return the record at `key`. Raises BadInput naming the key and the field that does not fit."""
    try:
        record: Record = adapter(cast(Any, kind)).validate_json(value)
        return record
    except SettingError as error:
        raise BadInput(f"etcd key {key}: {error}. {_OTHER_VERSION}") from error
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
    if first["type"] == "json_invalid":
        why = first["ctx"]["error"]
        raise BadInput(f"etcd key {key} does not hold JSON: {why}. Remove it, or restore a backup of etcd")
    raise BadInput(f"etcd key {key}: {_in_words(first)}. {_OTHER_VERSION}")


def _in_words(wrong: Any) -> str:
    path = ""
    for part in wrong["loc"]:
        path += f".{part}" if str(part).isidentifier() else f"[{part!r}]"
    path = path.lstrip(".") or "value"
    match wrong["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":  # of a dataclass, of a model
            return f"unknown field {path}"
        case "missing":
            return f"field {path} is missing"
        case _:
            return f"{path} = {wrong['input']!r} does not fit"
