"""The native functions of one device, called alike."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple


class Kernels(NamedTuple):
    module: ModuleType
    device: str
    last: tuple[int, ...]
    """Arguments that only this device's functions have: the stream."""

    def call(self, name: str, *arguments: object) -> Any:
        return getattr(self.module, name)(*arguments, *self.last)
