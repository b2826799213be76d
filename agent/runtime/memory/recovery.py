"""What earlier runs left in the machines' memory, and how all ranks get the same generation of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from atoll.agent.runtime.checkpoint.header import Fingerprint
from atoll.agent.runtime.checkpoint.transfer import MAX_BYTES, Checkpoint
from atoll.agent.runtime.memory import slot
from atoll.agent.runtime.memory.live import assembled
from atoll.agent.runtime.memory.store import MAX_FILES, Generation, Held, Wanted, held
from atoll.agent.runtime.session import Session
from atoll.errors import CheckpointError
from atoll.v1.common_pb2 import LEVEL_WARNING

_MAX_SAID_BYTES: Final = 1 << 20
Said = list[tuple[Generation, int]]  # generation and shard


class Remembered:
    """What all ranks together hold. Every method but the properties is collective and gives the same on every rank."""

    def __init__(self, session: Session, folder: Path | None, model: Fingerprint) -> None:
        """Look. A node's ranks share its folder, and the work of verifying it. Raises PeerLost."""
        self._session, self._group = session, session.group
        self._wanted = Wanted(session.job, session.run, model)
        part = (session.place.local_rank, session.place.local_world_size)
        try:
            found = held(folder, self._wanted, part, self._passed_over) if folder is not None else []
        except CheckpointError as error:
            self._passed_over(str(error))
            found = []
        self._own = {(one.generation, one.shard): one for one in found}
        said = [encode(found)] if self._group is None else self._group.gather_bytes(encode(found))
        self._sources = sources([self._decoded(rank, raw) for rank, raw in enumerate(said)])

    def newest(self, newer_than: tuple[int, int]) -> tuple[Checkpoint, Generation] | None:
        """The newest generation of which every shard is there, if its (run, step) is above `newer_than`. Raises
        PeerLost."""
        for generation in complete(self._sources):
            if (generation.run, generation.step) <= newer_than:
                return None
            checkpoint = self._fetched(generation)
            everywhere = (
                [[1 if checkpoint else 0]] if self._group is None else self._group.gather_rows([bool(checkpoint)])
            )
            if checkpoint is not None and all(ok for (ok,) in everywhere):
                return checkpoint, generation
        return None

    def _fetched(self, generation: Generation) -> Checkpoint | None:
        shards, refused = [], None
        for index in range(generation.shards):
            source = self._sources[generation][index]
            content = self._content(generation, index) if source == self._rank else None
            if self._group is not None:
                content = self._group.broadcast_array(content, source, MAX_BYTES)
            try:
                shard = slot.parse(content if content is not None else np.empty(0, np.uint8))
                self._wanted.check(shard.header)
                shards.append(shard)
            except CheckpointError as error:
                refused = refused or f"shard {index} of step {generation.step}, from rank {source}: {error}"
        try:
            if refused is None:
                return assembled(shards)
        except CheckpointError as error:
            refused = str(error)
        self._passed_over(refused or "")
        return None

    def _content(self, generation: Generation, index: int) -> slot.Bytes:
        """The file's bytes; none where it cannot be read any more, which every rank then sees alike."""
        try:
            return slot.content_of(self._own[generation, index].path)
        except CheckpointError as error:
            self._passed_over(str(error))
            return np.empty(0, np.uint8)

    def _decoded(self, rank: int, raw: bytes) -> Said:
        try:
            return decode(raw)
        except CheckpointError as error:
            self._passed_over(f"what rank {rank} says it holds: {error}")
            return []

    @property
    def _rank(self) -> int:
        return self._session.place.rank

    def _passed_over(self, why: str) -> None:
        self._session.notice(LEVEL_WARNING, f"rank {self._rank} passes over a checkpoint in memory: {why}")


def encode(found: Sequence[Held]) -> bytes:
    """What this rank says it holds."""
    rows = [[g.generation.run, g.generation.step, g.generation.shards, g.generation.layout, g.shard] for g in found]
    return json.dumps(rows).encode()


def decode(raw: bytes) -> Said:
    """What `encode` gave on another rank. Raises CheckpointError."""
    try:
        rows = json.loads(raw) if len(raw) <= _MAX_SAID_BYTES else None
        if not isinstance(rows, list) or len(rows) > MAX_FILES:
            raise CheckpointError(f"{len(raw)} bytes are no list of at most {MAX_FILES} shards")
        said = []
        for run, step, shards, layout, shard in rows:
            numbers = (run, step, shards, shard)
            sound = all(type(number) is int and 0 <= number < 2**63 for number in numbers) and shard < shards
            if not sound or not isinstance(layout, str):
                raise CheckpointError(f"{(*numbers, layout)!r:.200} is no shard")
            said.append((Generation(run, step, shards, layout), shard))
        return said
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{len(raw)} bytes cannot be read: {error}") from error


def sources(said: Sequence[Said]) -> dict[Generation, dict[int, int]]:
    """For each generation, by shard, the lowest rank that holds it. said: by rank. Pure."""
    found: dict[Generation, dict[int, int]] = {}
    for rank, rows in enumerate(said):
        for generation, shard in rows:
            found.setdefault(generation, {}).setdefault(shard, rank)
    return found


def complete(found: Mapping[Generation, Mapping[int, int]]) -> list[Generation]:
    """Generations of which every shard is there, the newest first. Pure."""
    return sorted((g for g, by_shard in found.items() if len(by_shard) == g.shards), reverse=True)
