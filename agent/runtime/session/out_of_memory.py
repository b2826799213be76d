"""Recognises errors of torch and Python that say that memory did not suffice."""

from __future__ import annotations

from typing import Final

import torch

from atoll.errors import AtollError

_OF_RUNTIME_ERRORS: Final = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words of RuntimeErrors that torch raises where no class tells: of its CPU allocator and of libraries on GPUs."""


class OutOfMemory(AtollError):
    """A pass needed more memory than its device has. batch: its samples."""

    def __init__(self, batch: int, cause: BaseException) -> None:
        first_line = str(cause).strip().partition("\n")[0]
        super().__init__(f"{batch} samples need more memory than there is: {first_line}")
        self.batch = batch


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error says that an allocation failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_RUNTIME_ERRORS)
