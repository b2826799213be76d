"""A checkpoint for a peer that lacks it: a list of its tensors with their hashes, then those that the peer has not got.
Verified on arrival; no code in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.agent.runtime.checkpoints.disk import manifest
from atoll.agent.runtime.checkpoints.disk.header import MAX_TENSORS, Header, check_size
from atoll.agent.runtime.checkpoints.disk.tensorfile import DTYPE_NAMES, DTYPES, bytes_of, digest_of, is_shape, ordered
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import CheckpointError


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A whole, verified checkpoint in memory. `path` is the folder that it was read from, None for one from a peer."""

    header: Header
    tensors: Mapping[str, torch.Tensor]
    scalars: Any
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class ListedTensor:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str  # XXH3, 128 bit, of its bytes

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_that(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the same bits."""
        alike = tensor.dtype == self.dtype and tuple(tensor.shape) == self.shape
        return alike and digest_of(tensor) == self.digest


@dataclass(frozen=True, slots=True)
class TensorList:
    """tensors: wide elements first, so that each is aligned to its own in what is sent."""

    header: Header
    scalars: Any
    tensors: Sequence[ListedTensor]

    def lacking(self, known: Mapping[str, torch.Tensor]) -> list[bool]:
        """Return, for each tensor, whether it is not in `known` with the same bits."""
        return [not (one.name in known and one.is_that(known[one.name])) for one in self.tensors]

    def sent_bytes(self, wanted: Sequence[bool]) -> int:
        return sum(one.bytes for one, is_wanted in zip(self.tensors, wanted, strict=True) if is_wanted)

    def read(
        self, wanted: Sequence[bool], sent: npt.NDArray[np.uint8], known: Mapping[str, torch.Tensor]
    ) -> LoadedCheckpoint:
        """sent: uint8 [sent_bytes], as `gathered` made it. It becomes the tensors'; those not wanted are of `known`.
        Raises CheckpointError where it is not what is listed."""
        if sent.nbytes != self.sent_bytes(wanted):
            raise CheckpointError(f"a peer sent {sent.nbytes} bytes of a checkpoint in place of its tensors'")
        found, at = {}, 0
        for one, is_wanted in zip(self.tensors, wanted, strict=True):
            if not is_wanted:
                found[one.name] = known[one.name]
                continue
            flat = torch.from_numpy(sent[at : at + one.bytes])
            found[one.name] = flat.view(one.dtype).view(one.shape)
            at += one.bytes
            if not one.is_that(found[one.name]):
                raise CheckpointError(f"a checkpoint from a peer was damaged on the way: tensor {one.name}")
        return LoadedCheckpoint(self.header, found, self.scalars)


def listed(checkpoint: LoadedCheckpoint) -> TensorList:
    """Raises CheckpointError for what no checkpoint can hold, or is over the limit."""
    tensors = checkpoint.tensors
    order = ordered(tensors)
    check_size(sum(one.nbytes for one in tensors.values()), f"checkpoint {checkpoint.header.name}")
    entries = [ListedTensor(n, tensors[n].dtype, tuple(tensors[n].shape), digest_of(tensors[n])) for n in order]
    return TensorList(checkpoint.header, checkpoint.scalars, entries)


def gathered(listing: TensorList, wanted: Sequence[bool], tensors: Mapping[str, torch.Tensor]) -> npt.NDArray[np.uint8]:
    """The wanted tensors' bytes, one after the other; uint8 [sent_bytes]."""
    sent, at = np.empty(listing.sent_bytes(wanted), np.uint8), 0
    for one, is_wanted in zip(listing.tensors, wanted, strict=True):
        if is_wanted:
            sent[at : at + one.bytes] = np.frombuffer(_bytes(tensors[one.name]), np.uint8)
            at += one.bytes
    return sent


def to_bytes(listing: TensorList) -> bytes:
    """Raises CheckpointError where its scalars are no plain JSON."""
    rows = [[one.name, DTYPE_NAMES[one.dtype], one.shape, one.digest] for one in listing.tensors]
    return manifest.sealed({"header": listing.header.to_json(), "tensors": rows, "scalars": listing.scalars})


def from_bytes(raw: bytes) -> TensorList:
    """Raises CheckpointError saying what is wrong with these bytes of a peer."""
    try:
        body = manifest.unsealed(raw)
        rows, scalars, header = body["tensors"], body["scalars"], Header.from_json(body["header"])
        tensors = [ListedTensor(str(name), DTYPES[kind], _shape(shape), str(seal)) for name, kind, shape, seal in rows]
    except (CheckpointError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"what a peer says of its checkpoint cannot be read: {error}") from error
    check_size(sum(one.bytes for one in tensors), "what a peer calls a checkpoint")
    if len(tensors) > MAX_TENSORS or len({one.name for one in tensors}) < len(tensors):
        raise CheckpointError(
            f"a peer speaks of {len(tensors)} tensors as a checkpoint; at most {MAX_TENSORS} are taken, each once"
        )
    return TensorList(header, scalars, tensors)


def _shape(shape: Any) -> tuple[int, ...]:
    if not is_shape(shape):
        raise ValueError(f"the shape {shape!r}")
    return tuple(shape)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach().cpu().contiguous())


def transfer_checkpoint(
    group: Group,
    own: LoadedCheckpoint | None,
    source: int,
    lacking: Sequence[int],
    known: Mapping[str, torch.Tensor] | None = None,
) -> LoadedCheckpoint | None:
    """Send the checkpoint of rank `source` to the ranks `lacking`, which verify it. Collective.

    own: the checkpoint, on rank `source`. known: tensors that this rank has, by their names in the checkpoint; equal
    bits are not sent. Returns the checkpoint on the ranks `lacking`, None elsewhere. Raises PeerLost,
    CheckpointError."""
    here, has = group.rank, known or {}
    mine = listed(own) if here == source and own is not None else None
    said = group.broadcast_bytes(to_bytes(mine) if mine is not None else None, source)
    listing = mine or from_bytes(said)
    wants = listing.lacking(has) if here in lacking else [False] * len(listing.tensors)
    rows = [np.frombuffer(row, np.uint8) for row in group.gather_bytes(np.packbits(wants).tobytes())]
    together = np.unpackbits(np.bitwise_or.reduce(rows), count=len(listing.tensors)).astype(bool).tolist()
    content = gathered(listing, together, own.tensors) if mine is not None and own is not None else None
    routes = [(source, rank) for rank in lacking]
    sent = group.distribute(content, listing.sent_bytes(together), routes)
    return listing.read(together, sent, has) if here in lacking else None
