"""Translates what the native kernels raise into Atoll's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import BadInput


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Around the call of the kernel `name`: raises BadInput for what does not fit."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name}: {error}") from error
