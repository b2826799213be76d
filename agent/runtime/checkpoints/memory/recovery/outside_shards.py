"""Fetches shards from machines that hold them and have no part in the run: their agents serve them.

What comes lies in a file of this machine's memory then, as if it had been there: it is verified and used like all that
was. A rank keeps no more of it than the pieces that are under way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError
from humanize import naturalsize

from atoll.agent.runtime.checkpoints.disk.shard_folders import MAX_FILES
from atoll.agent.runtime.checkpoints.memory.recovery.outside_agents import OutsideAgents, OutsideShard
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import SlotFile
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation, Resumable, WholeShard
from atoll.agent.runtime.session.session import MemorySettings, Session
from atoll.agent.runtime.transport.keys import keys_of
from atoll.errors import CheckpointError
from atoll.v1.agents_pb2 import ShardHolder
from atoll.v1.common_pb2 import LEVEL_INFO, LEVEL_WARNING

_ROUND_S: Final = 20.0
"""After which all ranks meet: however large a shard is, no collective waits for longer than that."""
_MAX_JSON_BYTES: Final = 4 << 20
Sources = Mapping[Generation, Mapping[int, int]]


def fetch_outside(
    session: Session, memory: MemorySettings, wanted: Resumable, held: Sources, newer_than: tuple[int, int]
) -> list[WholeShard]:
    """Fetch shards of the newest generation that is complete with them; return those that this rank has fetched. held:
    by generation and shard, a rank that holds it. Collective; raises PeerLost."""
    rank, ranks = session.place.rank, session.place.world_size
    told = _told(session, memory) if rank == 0 else b""
    try:  # one launch counts: another controller may have made the other ranks'
        holders, outside = _decoded(told if session.group is None else session.group.gather_bytes(told)[0])
    except CheckpointError as error:
        _passed_over(session, str(error))
        return []
    wants = missing(held, outside, newer_than)
    if not wants or session.keys is None:
        return []
    if rank == 0:
        nodes = ", ".join(sorted({holders[one.holder].node for one in wants}))
        what = f"{len(wants)} shards of step {wants[0].generation.step}"
        session.notice(LEVEL_INFO, f"{what} come from the memory of {nodes}, which has no part in this run")
    found: list[WholeShard] = []
    with OutsideAgents(holders, keys_of(session.keys, rank)) as agents:
        steps = _steps(session, memory, wanted, agents, wants[rank::ranks], found=found)
        while _goes_on(session, steps):
            pass
    return found


def missing(
    held: Mapping[Generation, Mapping[int, int]], outside: Sequence[OutsideShard], newer_than: tuple[int, int]
) -> list[OutsideShard]:
    """Return the shards that the run lacks of the newest generation that is complete with them, each once. Empty unless
    that generation is newer than `newer_than`, (run, step), and than any that is complete without them. held: holders
    by shard. Pure."""
    there = {g: dict.fromkeys(by_shard) for g, by_shard in held.items()}
    whole = [g for g, by_shard in there.items() if len(by_shard) == g.shards]
    for one in outside:
        there.setdefault(one.generation, {})[one.shard] = None
    newest = max((g for g, by_shard in there.items() if len(by_shard) == g.shards), default=None)
    if newest is None or (newest.run, newest.step) <= newer_than or (whole and newest <= max(whole)):
        return []
    lacks = {one.shard: one for one in outside if one.generation == newest and one.shard not in held.get(newest, {})}
    return [lacks[shard] for shard in sorted(lacks)]


def _told(session: Session, memory: MemorySettings) -> bytes:
    """List for all ranks what the agents hold that the launch names."""
    if not memory.outside or session.keys is None:
        return b""
    with OutsideAgents(memory.outside, keys_of(session.keys, session.place.rank)) as agents:
        found, troubles = agents.listed()
    for text in troubles:
        session.notice(LEVEL_WARNING, text)
    holders = [one.SerializeToString().hex() for one in memory.outside]
    return json.dumps([holders, [one.to_json() for one in found[:MAX_FILES]]]).encode()


def _decoded(raw: bytes) -> tuple[list[ShardHolder], list[OutsideShard]]:
    """Decode the list that rank 0 sent. Raises CheckpointError."""
    if not raw:
        return [], []
    try:
        if len(raw) > _MAX_JSON_BYTES:
            raise ValueError("too many")
        named, rows = json.loads(raw)
        holders = [ShardHolder.FromString(bytes.fromhex(one)) for one in named]
        shards = [OutsideShard.of(row) for row in rows]
        if any(one.holder >= len(holders) for one in shards):
            raise ValueError("an agent that is not named")
        return holders, shards
    except (ValueError, TypeError, RecursionError, DecodeError) as error:
        raise CheckpointError(f"{len(raw)} bytes of shards elsewhere cannot be read: {error}") from error


def _goes_on(session: Session, steps: Iterator[None]) -> bool:
    """A round of fetching; whether a rank has more to fetch. Raises PeerLost."""
    ends_s, left = time.monotonic() + _ROUND_S, False
    for _ in steps:
        if time.monotonic() > ends_s:
            left = True
            break
    return left if session.group is None else any(more for (more,) in session.group.gather_rows([left]))


def _steps(
    session: Session, memory: MemorySettings, wanted: Resumable, agents: OutsideAgents, wants: Sequence[OutsideShard],
    *, found: list[WholeShard],
) -> Iterator[None]:  # fmt: skip
    """Fetch them one after the other, into `found` what is sound."""
    taken = 0
    for one in wants:
        taken += one.bytes
        path = None
        try:
            path = _path(memory, one, taken)
            file = SlotFile(path)
            try:
                for _ in agents.fetch(one, file):
                    yield
            finally:
                file.close()
            shard = shard_file.parse(shard_file.sealed_part(shard_file.content_of(path)))
            wanted.check(shard.header)
            if (Generation.of(shard), shard.tail.shard) != (one.generation, one.shard):
                raise CheckpointError("it is another one than was named")
            found.append(WholeShard(one.generation, one.shard, path))
        except CheckpointError as error:
            _passed_over(session, f"shard {one.shard} of step {one.generation.step}, elsewhere: {error}")
            if path is not None:
                path.unlink(missing_ok=True)


def _path(memory: MemorySettings, one: OutsideShard, taken: int) -> Path:
    """Return where the shard is to lie here: over the older of the two slots. Raises CheckpointError."""
    in_memory = memory.folder is not None and taken <= memory.room_bytes
    if not in_memory and (memory.disk_folder is None or taken > memory.disk_room_bytes):
        raise CheckpointError(f"there is no room for {naturalsize(taken)}")
    slots = memory.folders.slots(one.shard, one.generation.shards, on_disk=not in_memory)
    return min(slots, key=lambda path: path.stat().st_mtime_ns if path.exists() else 0)


def _passed_over(session: Session, why: str) -> None:
    session.notice(LEVEL_WARNING, f"rank {session.place.rank} passes over a checkpoint in memory: {why}")
