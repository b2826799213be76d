"""One word for what a script trains, equal exactly where parameters, dataset and optimizer's settings are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

_SAME: Final = ("parameters", "samples", "optimizer")


def fingerprint_of(description: Mapping[str, Any]) -> str:
    """description: as probe.description gives it; its batch does not count. SHA-256 in hexadecimal."""
    same = {key: description[key] for key in _SAME}
    return sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
