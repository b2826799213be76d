"""Records of earlier versions in the form of today, for the codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from atoll.controller.state.records import PlacementRecord

Data = dict[str, Any]


def as_now(kind: type, data: Data) -> Data:
    """`data` of a record of this kind, with the fields of today. What already has them is left as it is."""
    change = _CHANGES.get(kind)
    return change(data) if change is not None else data


def _placement(data: Data) -> Data:
    """Until 0.1 a placement was plan number 0 of its run."""
    if data.get("id") != 0:
        return data
    return {name: data[name] for name in ("run", "reason", "input", "output") if name in data}


_CHANGES: Final[Mapping[type, Callable[[Data], Data]]] = {PlacementRecord: _placement}
