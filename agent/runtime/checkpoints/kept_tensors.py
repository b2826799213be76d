"""Copies of a model's tensors that a forward pass may change, as they were at the last boundary.

What trains is changed by optimizer.step() alone, as a rule, and is read where it is. Buffers are always copied.
Parameters that do not train (a momentum encoder, an average of weights inside the model, a frozen layer) are copied
too, as far as the copies take little memory beside what trains. What is not copied is watched: where a write to it is
seen before the update, it is copied from the next boundary on. torch counts writes, but not those by `.data`: a few
entries are compared as well."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.model_state import ModelTensors, alike
from atoll.agent.runtime.step.memory_order import flat_view
from atoll.agent.runtime.step.optimizers.as_one import OptimizerState
from atoll.errors import CheckpointError

COPIED_SHARE: Final = 2.0
"""Copies of what does not train take at most this times the bytes of what trains."""
ALWAYS_COPIED_BYTES: Final = 64 << 20
"""As much is copied where little trains."""
FORGET_AFTER: Final = 1024
"""Boundaries after which a parameter that was written outside of optimizer.step() counts as any other again."""


SAMPLED: Final = 16
"""Entries of a tensor that are compared."""
_SAMPLED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


Place = tuple[int, int, torch.dtype]  # address, entries


class MovedWhileRead(CheckpointError):
    """The script wrote a tensor that a checkpoint reads where it is."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A tensor as it was at the boundary, for what torch tells of writes."""

    name: str
    tensor: torch.Tensor
    place: int
    version: int

    @property
    def where(self) -> Place:
        return self.place, self.tensor.numel(), self.tensor.dtype

    @property
    def moved(self) -> bool:
        return self.tensor._version != self.version or self.tensor.data_ptr() != self.place


class KeptTensors:
    """`take` and `note_writes` on the training thread, `check` on any."""

    def __init__(self, model: nn.Module, optimizer: OptimizerState) -> None:
        self._model, self._optimizer = model, optimizer
        self.saved: dict[str, torch.Tensor] = {}
        """Copies of buffers and parameters of the state dict, by plain name."""
        self._unsaved: dict[str, torch.Tensor] = {}  # copies of buffers that are not in the state dict
        self._there: set[str] = set()  # all buffers
        self._empty: set[str] = set()  # buffers that were None
        self._copied: set[int] = set()  # id(parameter), and of buffers that are not saved
        self._marks: list[_Mark] = []
        self._views: dict[Place, torch.Tensor] = {}  # of a few entries of watched tensors
        self._samples: dict[torch.device, torch.Tensor] = {}  # those entries as they were
        self._written: dict[int, int] = {}  # id(tensor): boundary at which a write to it was seen
        self._moved: set[int] = set()  # id(parameter) of those that do not train and moved all the same
        self._boundary = 0

    @torch.no_grad()
    def take(self, elsewhere: Collection[int]) -> int:
        """Copy what may move. Returns how many bytes more may be copied.

        elsewhere: id(parameter) of those whose value a checkpoint does not take from the model."""
        self._boundary += 1
        tensors = ModelTensors.of(self._model)
        trained, optional = self._parted(tensors)
        room = max(ALWAYS_COPIED_BYTES, int(COPIED_SHARE * sum(map(size, trained.values()))))
        shapes = {one.shape for one in trained.values()}
        copied = {
            key for key, seen in self._written.items() if self._boundary - seen < FORGET_AFTER and key not in elsewhere
        }
        # First what has the shape of something that trains, as averages of it have.
        for one in sorted(optional.values(), key=lambda one: (one.shape not in shapes, size(one))):
            if size(one) <= room:
                copied.add(id(one))
                room -= size(one)
        self._copied = copied
        parameters = {name: one for name, one in tensors.parameters.items() if id(one) in copied}
        if elsewhere:
            self._moved |= {
                id(one) for name, one in parameters.items() if (old := self.saved.get(name)) is not None
                and id(one) not in self._moved and not (alike(old, one) and torch.equal(old, one))
            }  # fmt: skip
        self.saved = _copies(self.saved, {**tensors.buffers, **parameters})
        self._unsaved = _copies(
            self._unsaved, {name: one for name, one in tensors.unsaved.items() if id(one) in copied}
        )
        self._there, self._empty = {*tensors.buffers, *tensors.unsaved}, tensors.empty
        named = {id(one): (name, one) for name, one in tensors.parameters.items()}
        self._marks, before = [], self._views
        self._views = {}
        watched = (both for key, both in named.items() if key not in copied and key not in elsewhere)
        self._watch(watched, before)
        return room

    def watch(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """After `take`: these are read where they are, too."""
        self._watch(((name, one) for one in tensors), {})

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Whether a write to it can be undone."""
        return id(parameter) in self._copied

    def stays(self, parameter: torch.Tensor) -> bool:
        """Whether it was the same at each `take` in which others were elsewhere: then it is the same on all ranks."""
        return id(parameter) not in self._moved and id(parameter) not in self._written

    def check(self) -> None:
        """Raises MovedWhileRead where a tensor without a copy was written since `take`."""
        if moved := self._note():
            raise MovedWhileRead(
                f"{moved[0].name} was written outside of optimizer.step() while it was read, so what was read is of "
                "two steps. From the next step on a copy of it is kept"
            )

    def note_writes(self) -> set[str]:
        """The update begins: writes from here on are its own. Returns the names of what was written before, as far as
        that is known without waiting for a device."""
        return {mark.name for mark in self._note(of_devices=False)}

    def forget(self) -> None:
        """Everything may change from here on; nothing is read before the next `take`."""
        self._marks, self._samples = [], {}

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the model's tensors what they were, in the memory where they are: captured graphs know that."""
        live = ModelTensors.of(self._model)
        buffers = {**live.buffers, **live.unsaved}
        for name, copy in {**self.saved, **self._unsaved}.items():
            parameter, (path, _, key) = live.parameters.get(name), name.rpartition(".")
            into = buffers.get(name) if parameter is None else parameter.detach()
            if into is not None and alike(into, copy):
                into.copy_(copy)
            elif parameter is not None:
                parameter.data = copy.clone()
            elif path in live.owners:
                live.owners[path]._buffers[key] = copy.clone()
        for name in buffers.keys() - self._there:
            path, _, key = name.rpartition(".")
            if name in self._empty:
                live.owners[path]._buffers[key] = None
            else:
                del live.owners[path]._buffers[key]

    def _parted(self, tensors: ModelTensors) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """What trains, and what does not and is no buffer of the state dict."""
        in_groups = (one for group in self._optimizer.param_groups for one in group["params"])
        trained = {id(one): one for one in in_groups if one.requires_grad}
        parameters = (one for one in tensors.parameters.values() if id(one) not in trained)
        return trained, {id(one): one for one in (*parameters, *tensors.unsaved.values())}

    def _watch(self, named: Iterable[tuple[str, torch.Tensor]], before: Mapping[Place, torch.Tensor]) -> None:
        """before: views that may be used again."""
        for name, one in named:
            if one.is_inference():
                continue  # torch counts nothing
            mark = _Mark(name, one, one.data_ptr(), one._version)
            self._marks.append(mark)
            if one.dtype in _SAMPLED_DTYPES and one.numel() and (flat := flat_view(one)) is not None:
                known = before.get(mark.where)
                self._views[mark.where] = flat[:: -(-len(flat) // SAMPLED)] if known is None else known
        self._samples = {device: self._sampled(device) for device in {one.device for one in self._views.values()}}

    def _sampled(self, device: torch.device) -> torch.Tensor:
        """A few entries of each watched tensor there, one after the other."""
        return torch.cat([view for view in self._views.values() if view.device == device])

    def _note(self, *, of_devices: bool = True) -> list[_Mark]:
        moved = [mark for mark in self._marks if mark.moved]
        for device, was in self._samples.items():
            if of_devices or device.type == "cpu":
                rewritten = self._rewritten(device, was)
                moved += [mark for mark in self._marks if mark.where in rewritten]
        for mark in moved:
            self._written[id(mark.tensor)] = self._boundary
        return moved

    def _rewritten(self, device: torch.device, was: torch.Tensor) -> set[Place]:
        """The watched tensors there whose entries are others than they were."""
        now = self._sampled(device)
        if torch.equal(now.view(torch.uint8), was.view(torch.uint8)):  # a NaN equals itself
            return set()
        changed, at = set(), 0
        for where, view in self._views.items():
            if view.device == device:
                if not torch.equal(now[at : at + len(view)], was[at : at + len(view)]):
                    changed.add(where)
                at += len(view)
        return changed


def size(tensor: torch.Tensor) -> int:
    """In bytes."""
    return tensor.numel() * tensor.element_size()


def _copies(before: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies by name, in the memory of those before where they fit. Every time: batch norm updates its statistics
    without counting up the tensor's version. A tensor with several names has one copy."""
    copies: dict[str, torch.Tensor] = {}
    of: dict[int, torch.Tensor] = {}
    used: set[int] = set()
    into: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for name, one in live.items():
        if id(one) not in of:
            copy = before.get(name)
            if copy is None or not alike(copy, one) or id(copy) in used:
                copy = one.detach().clone()
            else:
                used.add(id(copy))
                into.append(copy)
                sources.append(one.detach())
            of[id(one)] = copy
        copies[name] = of[id(one)]
    if into:
        torch._foreach_copy_(into, sources)  # one call for all
    return copies
