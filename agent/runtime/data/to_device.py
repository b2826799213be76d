"""Moves the tensors of a batch to the training device, in whatever containers the script put them."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from copy import copy
from typing import Any, Final

import torch

_TEXT_AND_NUMBERS: Final = (str, bytes, bytearray, memoryview, range)
_COPYING_DEVICES: Final = frozenset({"cuda"})
"""Types of device that copy from pinned memory by themselves."""


def moved(batch: Any, device: torch.device, *, pinned: bool | None = None) -> Any:
    """Return the batch with its tensors on `device`. What the move does not change comes back as the same object.

    pinned: True where the caller had the batch pinned and nothing writes that memory again: copies do not block. None:
    on a CUDA device plain tensors are copied through pinned memory that is theirs alone. False: copies block.

    An object whose class has `to` moves itself. Mappings, sequences, named tuples and dataclasses are copied as
    torch's pin_memory copies them: the copy has the same class and attributes. Other objects stay as they are, for
    what they hold is not known; so the batch itself is never written to, which a dataset may give again."""
    if isinstance(batch, torch.Tensor):
        return _moved_tensor(batch, device, pinned)
    if batch is None or isinstance(batch, (_TEXT_AND_NUMBERS, bool, int, float, complex, type)):
        return batch
    if callable(getattr(type(batch), "to", None)):
        return _moved_by_itself(batch, device)

    def move(value: Any) -> Any:
        return moved(value, device, pinned=pinned)

    if isinstance(batch, Mapping):
        return _mapping(batch, _changed({key: batch[key] for key in batch}, move))
    if isinstance(batch, Sequence):
        changed = _changed(dict(enumerate(batch)), move)
        return _sequence(batch, changed) if changed else batch
    if fields := _fields(batch):
        return _with_attributes(batch, _changed({name: getattr(batch, name) for name in fields}, move))
    return batch


def _moved_tensor(tensor: torch.Tensor, device: torch.device, pinned: bool | None) -> torch.Tensor:
    """Return the tensor on `device`.

    A copy from pageable memory, and one that blocks, waits on the host for all that the current stream has queued: the
    step before. A copy from pinned memory is queued in the current stream, where what uses the batch comes after it.
    torch's allocator of pinned memory records an event behind the copy, and gives the memory to nobody before it. A
    tensor that the script pinned itself is copied as before: the script may write it again once it has the batch."""
    if pinned is None and device.type in _COPYING_DEVICES and _can_be_pinned(tensor):
        return _pinned_like(tensor).copy_(tensor).to(device, non_blocking=True)
    return tensor.to(device, non_blocking=bool(pinned))


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a copy in pinned memory is the same tensor. Subclasses and autograd's tensors are more."""
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and not tensor.requires_grad and not tensor.is_pinned()


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return empty pinned memory of the tensor's shape, in the order that a copy to a device would have."""
    return torch.empty_like(tensor, pin_memory=True)


def _moved_by_itself(batch: Any, device: torch.device) -> Any:
    try:
        return batch.to(device)
    except (TypeError, ValueError, AttributeError):  # e.g. a quantity, whose `to` takes a unit
        return batch


def _changed(values: dict[Any, Any], move: Any) -> dict[Any, Any]:
    """Return those values that `move` replaces."""
    found = ((key, move(value), value) for key, value in values.items())
    return {key: new for key, new, old in found if new is not old}


def _mapping(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    if not changed:
        return batch
    if not isinstance(batch, MutableMapping):
        try:
            return type(batch)({**batch, **changed})  # type: ignore[call-arg]
        except TypeError:  # it is not made of a mapping, as torch assumes too
            return {**batch, **changed}
    clone: Any = copy(batch)
    if not isinstance(batch, UserDict) and getattr(batch, "__dict__", None) is batch:
        clone.__dict__ = clone  # a dict whose keys are its attributes
    for key, value in changed.items():  # not `update`, which HF's ModelOutput refuses
        clone[key] = value
    return clone


def _sequence(batch: Sequence[Any], changed: dict[Any, Any]) -> Any:
    if isinstance(batch, MutableSequence):
        clone = copy(batch)
        for at, value in changed.items():
            clone[at] = value
        return clone
    values = [changed.get(at, value) for at, value in enumerate(batch)]
    kind: Any = type(batch)
    if not isinstance(batch, tuple):
        try:
            return kind(values)
        except TypeError:
            return values
    try:
        clone = tuple.__new__(kind, values)  # also where the class has its own arguments, as named tuples do
    except TypeError:
        return kind(values)  # e.g. torch.return_types.max
    for name, value in getattr(batch, "__dict__", {}).items():
        setattr(clone, name, value)
    return clone


def _fields(batch: Any) -> list[str]:
    """Return the names of a dataclass's, or an attrs class's, fields that are set."""
    if dataclasses.is_dataclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
    else:
        names = [field.name for field in getattr(type(batch), "__attrs_attrs__", ())]
    return [name for name in names if hasattr(batch, name)]


def _with_attributes(batch: Any, changed: dict[str, Any]) -> Any:
    if not changed:
        return batch
    clone = copy(batch)  # not dataclasses.replace, which would call __init__ again
    for name, value in changed.items():
        object.__setattr__(clone, name, value)  # also where the class is frozen
    return clone
