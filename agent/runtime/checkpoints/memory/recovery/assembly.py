"""Puts a checkpoint together from shards. They may come from other machines: nothing in them is trusted before it
was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from atoll.agent.runtime.checkpoints.disk.state import pack_state, unpack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import DTYPE_NAMES, DTYPES, bytes_of, is_shape
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.checkpoints.memory.shards.live_state import size_of
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Bytes, Shard
from atoll.agent.runtime.checkpoints.memory.shards.shard_state import RESIDUAL
from atoll.agent.runtime.checkpoints.snapshot import Snapshot
from atoll.agent.runtime.step.durable import OwnState
from atoll.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def assembled(shards: Sequence[Shard], whose: int = 0, own: Bytes | None = None) -> LoadedCheckpoint:
    """The checkpoint whose shards these are, in order; each was verified. Raises CheckpointError where they do not
    belong together.

    own: where ranks had something of their own, that of rank `whose`; without it, what is in its shard."""
    first = shards[0]
    shared = _shared(shards)
    if first.tail.own is None:
        tensors, tree, moving = shared, first.layout.get("tree"), first.tail.moving
    else:
        tail = shards[whose].tail
        tensors = _tensors(tail.own, shards[whose].own if own is None else own)
        tensors |= _aliased(tail.own, shared)
        tree, moving = tail.own.get("tree"), tail.moving
    resting, moved = unpack_state(tensors, tree), unpack_state(tensors, moving)
    try:
        states = Snapshot.rejoined(resting, moved)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the state of {first.header.name} is malformed: {error!r}") from error
    return LoadedCheckpoint(first.header, *pack_state(states))


def own_state(shards: Sequence[Shard], rank: int, own: Bytes) -> OwnState:
    """What only `rank` had, of its verified own bytes. Raises CheckpointError."""
    residual = {
        name.removeprefix(RESIDUAL): tensor
        for name, tensor in _tensors(shards[rank].tail.own, own).items()
        if name.startswith(RESIDUAL)
    }
    masters = {
        name.removeprefix("master."): (dtype, shape)
        for name, dtype, shape in _entries(shards[0].layout)
        if name.startswith("master.")
    }
    if residual and {name: (DTYPE_NAMES[one.dtype], list(one.shape)) for name, one in residual.items()} != masters:
        raise CheckpointError(f"what rank {rank} had not sent is of other tensors than the model's")
    return OwnState(rank, residual, None)  # its optimizer's state came with the checkpoint


def _shared(shards: Sequence[Shard]) -> Tensors:
    first = shards[0]
    for index, shard in enumerate(shards):
        same = (shard.layout_digest, shard.header, shard.tail.total, shard.tail.own is None) == (
            first.layout_digest,
            first.header,
            first.tail.total,
            first.tail.own is None,
        )
        if not same or (shard.tail.shard, shard.tail.shards) != (index, len(shards)):
            raise CheckpointError(f"shard {index} of {first.header.name} is of another state")
    return _tensors(first.layout, np.concatenate([shard.data for shard in shards]))


def _tensors(layout: Any, content: Bytes) -> Tensors:
    entries = _entries(layout)
    total = sum(size_of(dtype, shape) for _, dtype, shape in entries)
    if total != len(content):
        raise CheckpointError(f"its tensors take {total} bytes; {len(content)} were written")
    tensors, at = {}, 0
    for name, dtype, shape in entries:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        size = size_of(dtype, shape)
        if size:
            np.frombuffer(bytes_of(tensor), np.uint8)[:] = content[at : at + size]
        tensors[name] = tensor
        at += size
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
    return found
