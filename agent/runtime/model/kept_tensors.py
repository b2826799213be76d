"""Copies of a model's tensors that a forward pass may change, as they were at the last boundary.

What trains is changed by optimizer.step() alone, as a rule, and is read where it is. Buffers are always copied.
Parameters that do not train (a momentum encoder, an average of weights inside the model, a frozen layer) are copied
too, as far as the copies take little memory beside what trains. What is not copied is watched: where a write to it is
seen before the update, it is copied from the next boundary on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.model.memory_order import flat_view
from atoll.agent.runtime.model.model_state import ModelTensors, alike
from atoll.errors import CheckpointError

SAMPLED: Final = 16
"""Entries of a tensor that are compared."""
_SAMPLED_DTYPES: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class WatchedTensors:
    """`watch` and `mark` on the training thread, `written` on any."""

    def __init__(self) -> None:
        self.tensors: Sequence[torch.Tensor] = ()
        self._places: list[int] = []
        self._versions: list[int] = []
        self._views: dict[int, torch.Tensor] = {}  # by index, of a few entries
        self._samples: dict[torch.device, tuple[list[int], torch.Tensor]] = {}  # indices, and their entries in a row

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Watch from the next `mark` on."""
        self.tensors, self._places, self._versions = tensors, [], []
        self._views, self._samples = {}, {}

    def mark(self) -> None:
        """Compare with this moment from now on, as far as torch counts writes."""
        places = [one.data_ptr() for one in self.tensors]
        if places != self._places:
            self._places, self._views = places, {}
        self._versions = [one._version for one in self.tensors]
        self._samples = {}

    def sample(self, indices: Iterable[int]) -> None:
        """Compare entries of these tensors as well. Call after `mark`, before anything is written."""
        by_device: dict[torch.device, list[int]] = {}
        for index in indices:
            if index in self._views or self._view(index):
                by_device.setdefault(self.tensors[index].device, []).append(index)
        self._samples = {device: (listed, self._entries(listed)) for device, listed in by_device.items()}

    def clear(self) -> None:
        """Nothing counts as written before the next `mark`."""
        self._versions, self._samples = [], {}

    def written(self, *, of_devices: bool = True) -> list[int]:
        """Indices of tensors that were written since `mark`. of_devices: also compare entries that are on a device,
        which waits for it."""
        if not self._versions:
            return []
        places = [one.data_ptr() for one in self.tensors]
        versions = [one._version for one in self.tensors]
        found: list[int] = []
        if places != self._places or versions != self._versions:
            pairs = zip(places, self._places, versions, self._versions, strict=True)
            found = [index for index, (place, was, version, old) in enumerate(pairs) if place != was or version != old]
        for device, (listed, was_N) in self._samples.items():
            if of_devices or device.type == "cpu":
                found += self._rewritten(listed, was_N)
        return found

    def _view(self, index: int) -> bool:
        tensor = self.tensors[index]
        flat = flat_view(tensor) if tensor.dtype in _SAMPLED_DTYPES and tensor.numel() else None
        if flat is not None:
            self._views[index] = flat[:: -(-len(flat) // SAMPLED)]
        return flat is not None

    def _entries(self, listed: Sequence[int]) -> torch.Tensor:
        return torch.cat([self._views[index] for index in listed])

    def _rewritten(self, listed: Sequence[int], was_N: torch.Tensor) -> list[int]:
        now_N = self._entries(listed)
        if torch.equal(now_N.view(torch.uint8), was_N.view(torch.uint8)):  # a NaN equals itself
            return []
        changed, at = [], 0
        for index in listed:
            until = at + len(self._views[index])
            if not torch.equal(now_N[at:until], was_N[at:until]):
                changed.append(index)
            at = until
        return changed


MAX_COPIED_RATIO: Final = 2.0
"""Bytes of copies of what does not train, over the bytes of what trains, at most."""
MIN_COPY_BUDGET_BYTES: Final = 4 << 20
"""Bytes that may be copied where little trains."""
FORGET_WRITES_AFTER: Final = 1024
"""Boundaries after which a parameter that the script wrote outside of optimizer.step() counts as any other again."""


class MovedWhileRead(CheckpointError):
    """The script wrote a tensor that a checkpoint reads where it is."""


@dataclass(slots=True)
class _Choice:
    """Choice of the model's tensors that are copied, and of those read in place. Equal keys give equal choices."""

    key: list[object]
    tensors: ModelTensors
    saved: dict[str, torch.Tensor]
    unsaved: dict[str, torch.Tensor]
    copied: set[int]  # id(tensor) of the parameters and unsaved buffers among them
    watched: list[str]
    untrained: list[int]  # of those that are watched, the indices
    room: int  # bytes more that may be copied


class KeptTensors:
    """`take`, `sample` and `note_writes` on the training thread, `check` on any."""

    def __init__(self, model: nn.Module, optimizer: OptimizerState) -> None:
        self._model, self._optimizer = model, optimizer
        self.saved: dict[str, torch.Tensor] = {}
        """Copies of buffers and parameters of the state dict, by plain name."""
        self._unsaved: dict[str, torch.Tensor] = {}  # copies of buffers that are not in the state dict
        self._choice: _Choice | None = None
        self._watch, self._beside = WatchedTensors(), WatchedTensors()
        self._beside_name = ""
        self._written: dict[int, int] = {}  # id(tensor): boundary at which a write to it was seen
        self._moved: set[int] = set()  # id(parameter) of those that do not train and moved all the same
        self._boundary = 0

    @torch.no_grad()
    def take(self, elsewhere: Collection[int]) -> int:
        """Copy what may move. Returns how many bytes more may be copied.

        elsewhere: id(parameter) of those whose value a checkpoint does not take from the model."""
        self._boundary += 1
        self._written = {
            key: seen for key, seen in self._written.items() if self._boundary - seen < FORGET_WRITES_AFTER
        }
        choice = self._chosen(elsewhere)
        if elsewhere:
            self._moved |= {id(one) for name, one in choice.saved.items() if self._differs(name, one)}
        self.saved = _copies(self.saved, choice.saved)
        self._unsaved = _copies(self._unsaved, choice.unsaved)
        self._watch.mark()
        self._watch.sample(choice.untrained)
        self._beside.watch(())
        return choice.room

    def watch(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Read these tensors in place, too. Call after `take`."""
        self._beside_name = name
        self._beside.watch(tensors)
        self._beside.mark()
        self._beside.sample(range(len(tensors)))

    def sample(self) -> None:
        """A checkpoint is about to be read, and nothing was written since `take`: see every write from now on."""
        self._watch.sample(range(len(self._watch.tensors)))

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Return whether a write to the tensor can be undone."""
        return self._choice is not None and id(parameter) in self._choice.copied

    def stays(self, parameter: torch.Tensor) -> bool:
        """Return whether the tensor was unchanged at each `take` where others had changed. Then all ranks have it."""
        return id(parameter) not in self._moved and id(parameter) not in self._written

    def check(self) -> None:
        """Raises MovedWhileRead where a tensor without a copy was written since `take`."""
        if moved := self._note(of_devices=True):
            raise MovedWhileRead(
                f"{moved[0]} was written outside of optimizer.step() while it was read, so what was read is of two "
                "steps. From the next step on a copy of it is kept"
            )

    def note_writes(self) -> set[str]:
        """The update begins: writes from here on are its own. Returns the names of what was written before, as far as
        that is known without waiting for a device."""
        found = set(self._note(of_devices=False))
        self.forget()
        return found

    def forget(self) -> None:
        """Everything may change from here on; nothing is read before the next `take`."""
        self._watch.clear()
        self._beside.clear()

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
        before = self._choice.tensors if self._choice is not None else live
        for name in buffers.keys() - before.buffers.keys() - before.unsaved.keys():
            path, _, key = name.rpartition(".")
            if name in before.empty:
                live.owners[path]._buffers[key] = None
            else:
                del live.owners[path]._buffers[key]

    def _chosen(self, elsewhere: Collection[int]) -> _Choice:
        """The choice of the boundary before, where modules, tensors and what trains are the same."""
        in_groups = [one for group in self._optimizer.param_groups for one in group["params"]]
        known = self._choice
        key: list[object] = [*map(id, in_groups), *(one.requires_grad for one in in_groups), *self._written]
        key += [len(elsewhere), *(known.tensors.identity() if known is not None else ())]
        if known is None or known.key != key:
            trained = {id(one): one for one in in_groups if one.requires_grad}
            known = self._choice = self._choose(trained, elsewhere)
            known.key = [*key[: 2 * len(in_groups) + len(self._written) + 1], *known.tensors.identity()]
        return known

    def _choose(self, trained: Mapping[int, torch.Tensor], elsewhere: Collection[int]) -> _Choice:
        tensors = ModelTensors.of(self._model)
        parameters = {id(one): one for one in tensors.parameters.values()}
        optional: dict[int, torch.Tensor] = {key: one for key, one in parameters.items() if key not in trained}
        optional |= {id(one): one for one in tensors.unsaved.values()}
        room = max(MIN_COPY_BUDGET_BYTES, int(MAX_COPIED_RATIO * sum(map(size, trained.values()))))
        shapes = {one.shape for one in trained.values()}
        copied = {key for key in self._written if key in parameters and key not in elsewhere}
        # First what has the shape of something that trains, as averages of it have.
        for one in sorted(optional.values(), key=lambda one: (one.shape not in shapes, size(one))):
            if size(one) <= room:
                copied.add(id(one))
                room -= size(one)
        watched = {
            id(one): name
            for name, one in tensors.parameters.items()
            if id(one) not in copied and id(one) not in elsewhere and not one.is_inference()
        }
        self._watch.watch([parameters[key] for key in watched])
        return _Choice(
            key=[],
            tensors=tensors,
            saved=tensors.buffers | {name: one for name, one in tensors.parameters.items() if id(one) in copied},
            unsaved={name: one for name, one in tensors.unsaved.items() if id(one) in copied},
            copied=copied,
            watched=list(watched.values()),
            untrained=[index for index, key in enumerate(watched) if key not in trained],
            room=room,
        )

    def _differs(self, name: str, live: torch.Tensor) -> bool:
        """Return whether a copied parameter that did not change so far has changed."""
        if not isinstance(live, nn.Parameter) or id(live) in self._moved or name not in self.saved:
            return False
        return not (alike(self.saved[name], live) and torch.equal(self.saved[name], live))

    def _note(self, *, of_devices: bool) -> list[str]:
        written = self._watch.written(of_devices=of_devices)
        for index in written:
            self._written[id(self._watch.tensors[index])] = self._boundary
        names = [self._choice.watched[index] for index in written] if self._choice is not None else []
        return names + [self._beside_name] * bool(self._beside.written(of_devices=of_devices))


def size(tensor: torch.Tensor) -> int:
    """Return the size in bytes."""
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
        if (copy := of.get(id(one))) is None:
            copy = before.get(name)
            if copy is None or not alike(copy, one) or id(copy) in used:
                copy = one.detach().clone()
            else:
                used.add(id(copy))
                into.append(copy)
                sources.append(one)
            of[id(one)] = copy
        copies[name] = copy
    if into:
        torch._foreach_copy_(into, sources)  # one call for all
    return copies
