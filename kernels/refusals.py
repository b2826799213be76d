"""Translate exceptions of the native kernels into Atoll's errors."""

from __future__ import annotations

from types import TracebackType

from atoll.errors import AtollError, BadInput


class refusals:
    """Context of a call of the kernel `name`: raises BadInput for arguments that do not fit.

    A class and no generator: the engine is called some fifty times a step, mostly with cold caches."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (translated := self._translated(error)) is not None:
            raise translated from error

    def _translated(self, error: BaseException) -> AtollError | None:
        return BadInput(f"{self._name}: {error}") if isinstance(error, TypeError | ValueError) else None
