"""Sharded checkpoints: ranks that all reach one directory write a state file each, of whole tensors.

Each rank writes its shard into a folder that they share, and beside it what it holds. Who finds that all are there, the
last one, seals them with one manifest and publishes the folder. Nobody waits for anybody; where a rank never comes, the
checkpoint never exists, and the folder is swept when a later one begins."""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from atoll.agent.runtime.checkpoints.disk import manifest
from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors, free_bytes, replace_file
from atoll.agent.runtime.checkpoints.disk.fence import locked, raise_fence
from atoll.agent.runtime.checkpoints.disk.files import publish, write_sealed, write_state
from atoll.agent.runtime.checkpoints.disk.folders import Moment, begin_shard, sweep
from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.listing import is_whole
from atoll.agent.runtime.checkpoints.disk.manifest import MANIFEST_FILE, Manifest, shard_file
from atoll.agent.runtime.checkpoints.disk.state import merged
from atoll.agent.runtime.checkpoints.disk.tensorfile import serialized
from atoll.errors import CheckpointError

SHARD_BYTES: Final = 64 << 20
"""A shard has so much at least: of a smaller state, fewer ranks write."""
SMALL_BYTES: Final = 64 << 10
"""Smaller tensors are the first shard's: statistics of a model's norms, which ranks may have differently."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part that one of `shards` ranks writes. layout: digest of all tensors' names, dtypes and shapes."""

    shard: int
    shards: int
    names: frozenset[str]
    layout: str


def shares(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[Share]:
    """Assign tensors to writers, about the same number of bytes each; the same for the same shapes. Pure."""
    count = max(1, min(ranks, sum(one.nbytes for one in tensors.values()) // SHARD_BYTES))
    names: list[set[str]] = [set() for _ in range(count)]
    filled = [(0, shard) for shard in range(count)]
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        if tensors[name].nbytes < SMALL_BYTES:
            names[0].add(name)
        else:
            taken, shard = heapq.heappop(filled)
            names[shard].add(name)
            heapq.heappush(filled, (taken + tensors[name].nbytes, shard))
    layout = fingerprint(tensors).digest
    return [Share(shard, count, frozenset(each), layout) for shard, each in enumerate(names)]


def write(
    directory: Path, header: Header, share: Share, tensors: Mapping[str, torch.Tensor], scalars: Any
) -> Path | None:
    """Write one shard, durable. Returns the checkpoint's path where this was the last one and published it.

    tensors: those of the share. scalars: as `pack_state` gave them; where shards are of different parts of a model,
    each has its own, and they are put together. None: the first shard's are of all. Raises CheckpointError if this run
    was fenced by a newer one, the disk refuses, or the shards are of different states."""
    final, moment = directory / header.name, Moment(header.run, header.step)
    with locked(directory):
        raise_fence(directory, header.run, header.view)
        sweep(directory, moment)
        if is_whole(final):
            return None
        with disk_errors(f"writing checkpoint {final}"):
            folder, held = begin_shard(directory, moment, share.shard)
    try:
        with disk_errors(f"writing checkpoint {final} ({free_bytes(directory)} bytes free)"):
            if _part_of(folder, share.shard).exists():
                return None  # by a rank that has the same
            name = shard_file(share.shard, share.shards)
            (folder / name).unlink(missing_ok=True)  # of one that died in the middle
            content = write_state(folder / name, serialized(tensors))
            body = {"layout": share.layout, "state": manifest.content_to_json(name, content)}
            if share.shard == 0:
                body |= {"header": header.to_json()}
            if scalars is not None:
                body |= {"scalars": scalars}
            replace_file(_part_of(folder, share.shard), manifest.sealed(body))  # whole as soon as others see it
        with locked(directory):
            raise_fence(directory, header.run, header.view)
            with disk_errors(f"publishing checkpoint {final}"):
                return _publish_if_last(folder, final, share)
    finally:
        os.close(held)


def _publish_if_last(folder: Path, final: Path, share: Share) -> Path | None:
    parts = [_part_of(folder, shard) for shard in range(share.shards)]
    if not all(part.exists() for part in parts):
        return None
    found = [manifest.unsealed(part.read_bytes()) for part in parts]
    if any(one["layout"] != share.layout for one in found):
        raise CheckpointError(f"the ranks' shards of {final.name} are of different tensors")
    files = dict(manifest.content_from_json(one["state"]) for one in found)
    scalars = merged([one["scalars"] for one in found if "scalars" in one])
    whole = Manifest(Header.from_json(found[0]["header"]), scalars, files)
    write_sealed(folder / MANIFEST_FILE, manifest.to_bytes(whole))
    for part in parts:
        part.unlink()
    publish(folder, final)
    return final


def _part_of(folder: Path, shard: int) -> Path:
    return folder / f".shard-{shard}.json"
