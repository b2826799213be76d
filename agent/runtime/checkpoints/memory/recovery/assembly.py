"""Puts a checkpoint together from shards. They may come from other machines: nothing in them is trusted before it
was checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.checkpoints.disk.state import pack_state, unpack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import DTYPE_NAMES, DTYPES, bytes_of, is_shape
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.checkpoints.memory.shards.live_state import pieces_of, size_of
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Bytes, Shard, Tail
from atoll.agent.runtime.checkpoints.memory.shards.shard_state import RESIDUAL
from atoll.agent.runtime.model.durable import AGGREGATOR_SUM, OwnState
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


class SharedState:
    """Shared state of a generation, assembled shard by shard. Beside its tensors, only the tail of each shard is
    kept."""

    def __init__(self) -> None:
        self.tails: list[Tail] = []
        self.tensors: Tensors = {}
        self._filled: list[Bytes] = []  # the memory of each tensor
        self._header: Header | None = None
        self._layout: Mapping[str, Any] = {}
        self._layout_digest = ""

    @staticmethod
    def of(shards: Iterable[Shard]) -> SharedState:
        """Assemble the state of shards in order."""
        state = SharedState()
        for shard in shards:
            state.add(shard)
        return state

    @property
    def header(self) -> Header:
        assert self._header is not None  # the first shard was added
        return self._header

    @property
    def tree(self) -> Any:
        return self._layout.get("tree")

    def add(self, shard: Shard) -> None:
        """The next shard, verified. Raises CheckpointError where it does not belong to those before."""
        tail, index = shard.tail, len(self.tails)
        if self._header is None:
            self._begin(shard)
        first = self.tails[0] if self.tails else tail
        same = (shard.layout_digest, shard.header, tail.total, tail.shards, tail.own is None) == (
            self._layout_digest,
            self._header,
            first.total,
            first.shards,
            first.own is None,
        )
        if not same or tail.shard != index:
            raise CheckpointError(f"shard {index} of {self.header.name} is of another state")
        for piece in pieces_of([len(one) for one in self._filled], tail.begin, tail.begin + tail.size):
            np.copyto(
                self._filled[piece.tensor][piece.begin : piece.end],
                shard.data[piece.to : piece.to + piece.end - piece.begin],
            )
        self.tails.append(tail)

    def shared_params(self) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of each shared parameter, by its layer."""
        return {
            name.removeprefix("shared_param."): (dtype, shape)
            for name, dtype, shape in _entries(self._layout)
            if name.startswith("shared_param.")
        }

    def _begin(self, first: Shard) -> None:
        self._header, self._layout, self._layout_digest = first.header, first.layout, first.layout_digest
        self.tensors = _empty(_entries(first.layout), first.tail.total)
        self._filled = [np.frombuffer(bytes_of(tensor), np.uint8) for tensor in self.tensors.values()]


def assembled(state: SharedState, whose: int = 0, own: Bytes | None = None) -> LoadedCheckpoint:
    """The checkpoint of a whole state. Raises CheckpointError where its parts do not belong together.

    own: where ranks had something of their own, that of rank `whose`, verified."""
    tail = state.tails[0]
    if len(state.tails) != tail.shards:
        raise CheckpointError(f"shard {len(state.tails)} of {state.header.name} is missing")
    tensors, tree = state.tensors, state.tree
    if _holds_states(tail.own):
        assert own is not None
        tail = state.tails[whose]
        tensors = _tensors(tail.own, own)
        tensors |= _aliased(tail.own, state.tensors)
        tree = tail.own.get("tree")
    resting, moved = unpack_state(tensors, tree), unpack_state(tensors, tail.moving)
    try:
        states = Snapshot.rejoined(resting, moved)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state of {state.header.name} is malformed: {error!r}") from error
    return LoadedCheckpoint(state.header, *pack_state(states))


def own_state(state: SharedState, rank: int, own: Bytes) -> OwnState:
    """Return the own state of `rank` from its verified own bytes. Raises CheckpointError."""
    told = {
        name.removeprefix(RESIDUAL): tensor
        for name, tensor in _tensors(state.tails[rank].own, own).items()
        if name.startswith(RESIDUAL)
    }
    residual = {name: tensor for name, tensor in told.items() if not name.startswith(AGGREGATOR_SUM)}
    sums = {name.removeprefix(AGGREGATOR_SUM): tensor for name, tensor in told.items() if name not in residual}
    listed = {name: (DTYPE_NAMES[one.dtype], list(one.shape)) for name, one in residual.items()}
    if residual and _holds_states(state.tails[rank].own) and listed != state.shared_params():
        raise CheckpointError(f"what rank {rank} had not sent is of other tensors than the model's")
    if (
        any(residual[name].shape != one.shape for name, one in sums.items() if name in residual)
        or sums.keys() - residual
    ):
        raise CheckpointError(f"what rank {rank} summed as aggregator is of other tensors than the model's")
    return OwnState(rank, residual, None, sums)  # its optimizer's state came with the checkpoint


def _holds_states(own: Any) -> bool:
    """Return whether ranks had own states of model and optimizer. Otherwise they had residuals alone, which their
    strategy checks."""
    return isinstance(own, dict) and "tree" in own


def _empty(entries: Sequence[tuple[str, str, list[int]]], written: int) -> Tensors:
    """Tensors to be filled with `written` bytes."""
    total = sum(size_of(dtype, shape) for _, dtype, shape in entries)
    if total != written:
        raise CheckpointError(f"its tensors take {total} bytes; {written} were written")
    try:
        return {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in entries}
    except RuntimeError as error:
        raise CheckpointError(f"no memory for its {total} bytes: {error}") from error


def _tensors(layout: Any, content: Bytes) -> Tensors:
    tensors, at = _empty(_entries(layout), len(content)), 0
    for tensor in tensors.values():
        into = np.frombuffer(bytes_of(tensor), np.uint8)
        into[:] = content[at : at + len(into)]
        at += len(into)
    return tensors


def _aliased(layout: Any, shared: Mapping[str, torch.Tensor]) -> Tensors:
    try:
        return {
            name: shared[same].as_strided(shape, stride) for name, (same, shape, stride) in layout["aliases"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"its list of shared tensors cannot be read: {error!r}") from error


def _entries(layout: Any) -> list[tuple[str, str, list[int]]]:
    found = []
    try:
        for name, dtype, shape in layout["tensors"]:
            if not isinstance(name, str) or dtype not in DTYPES or not is_shape(shape):
                raise CheckpointError(f"its layout gives tensor {name!r} the dtype {dtype!r} and the shape {shape!r}")
            found.append((name, dtype, shape))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its list of tensors cannot be read: {error!r}") from error
    if len({name for name, _, _ in found}) != len(found):
        raise CheckpointError("its list of tensors names one twice")
    return found
