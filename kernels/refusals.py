"""What the native kernels raise, as Atoll's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import BadInput


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """For the call of the kernel `name`: what does not fit is BadInput."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name}: {error}") from error
