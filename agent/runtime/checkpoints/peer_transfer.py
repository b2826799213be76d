"""Transfers a checkpoint from one rank directly to the ranks that lack it, without what they have already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from atoll.agent.runtime.checkpoints.disk import transfer
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.transport.process_groups import Group


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
    mine = transfer.listed(own) if here == source and own is not None else None
    said = group.broadcast_bytes(transfer.to_bytes(mine) if mine is not None else None, source)
    listing = mine or transfer.from_bytes(said)
    wants = listing.lacking(has) if here in lacking else [False] * len(listing.tensors)
    rows = [np.frombuffer(row, np.uint8) for row in group.gather_bytes(np.packbits(wants).tobytes())]
    together = np.unpackbits(np.bitwise_or.reduce(rows), count=len(listing.tensors)).astype(bool).tolist()
    content = transfer.gathered(listing, together, own.tensors) if mine is not None and own is not None else None
    routes = [(source, rank) for rank in lacking]
    sent = group.distribute(content, listing.sent_bytes(together), routes)
    return listing.read(together, sent, has) if here in lacking else None
