"""Hands a dataset to the loader's worker processes with the code that the training script defines for it.

Python's own way is that a worker process imports the script for its definitions, which trains a second time where the
script has no main guard, and fails in a notebook, which is no file. What is unpickled comes from the parent process."""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Final

import cloudpickle
from torch.utils.data import Dataset

from atoll.errors import BadInput

_FOUND_BY: Final = ("__spec__", "__file__")
"""What a new process finds the training script by."""


class ByValue(Dataset[Any]):
    """Arrives in a worker process as what it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        buffer = io.BytesIO()
        try:
            _SharingPickler(buffer).dump(self.held)
        except Exception as error:
            raise BadInput(
                f"{type(self.held).__name__} cannot be handed to a loader's worker process: {error}. It, or what its "
                "code refers to, holds something that is of this process alone: make that where it is used, or put the "
                "code into a module of its own"
            ) from error
        return cloudpickle.loads, (buffer.getvalue(),)


class _SharingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors go by shared memory, as in all that torch hands to a process."""

    dispatch_table: ClassVar[Any] = ChainMap(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )


@contextmanager
def without_script() -> Iterator[None]:
    """Inside, processes that are started do not import the training script."""
    main = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {name: main[name] for name in _FOUND_BY if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        del main["__spec__"]
        main.update(kept)
