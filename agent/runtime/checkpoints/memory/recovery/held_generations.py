"""Finds what earlier runs left in the machines' memory, and gives all ranks the same generation of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.disk.header import Fingerprint
from atoll.agent.runtime.checkpoints.disk.transfer import MAX_BYTES, LoadedCheckpoint
from atoll.agent.runtime.checkpoints.memory.recovery.assembly import assembled, own_state
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Shard
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import (
    MAX_FILES,
    Generation,
    Resumable,
    WholeShard,
    whole_shards,
)
from atoll.agent.runtime.step.durable import OwnState
from atoll.errors import BadInput, CheckpointError
from atoll.v1.common_pb2 import LEVEL_WARNING

_MAX_HOLDINGS_BYTES: Final = 1 << 20
Holdings = list[tuple[Generation, int]]  # generation and shard


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a run goes on from, as one rank takes it over. generation: of memory, where it came from there; own: what
    this rank takes over then, where ranks had something of their own."""

    checkpoint: LoadedCheckpoint
    generation: Generation | None = None
    own: Sequence[OwnState] | None = None


class HeldGenerations:
    """The generations that all ranks together hold. Methods are collective and give the same on every rank."""

    def __init__(self, session: Session, folder: Path | None, model: Fingerprint) -> None:
        """Look. A node's ranks share its folder, and the work of verifying it. Raises PeerLost."""
        self._session, self._group = session, session.group
        self._wanted = Resumable(session.job, session.run, model)
        part = (session.place.local_rank, session.place.local_world_size)
        try:
            found = whole_shards(folder, self._wanted, part, self._passed_over) if folder is not None else []
        except CheckpointError as error:
            self._passed_over(str(error))
            found = []
        self._own = {(one.generation, one.shard): one for one in found}
        gathered = [encode(found)] if self._group is None else self._group.gather_bytes(encode(found))
        self._sources = sources([self._decoded(rank, raw) for rank, raw in enumerate(gathered)])

    def newest(self, newer_than: tuple[int, int]) -> Recovered | None:
        """The newest generation of which every shard is there, if its (run, step) is above `newer_than`. Raises
        PeerLost."""
        for generation in complete(self._sources):
            if (generation.run, generation.step) <= newer_than:
                return None
            shards = self._fetched(generation)
            if not self._everywhere(shards is not None) or shards is None:
                continue
            differ = shards[0].tail.own is not None
            own = self._handed_out(generation, shards) if differ else {}
            recovered = self._recovered(generation, shards, own if differ else None)
            if self._everywhere(recovered is not None):
                return recovered
        return None

    def _everywhere(self, well: bool) -> bool:
        """Whether it went well on every rank."""
        return well if self._group is None else all(ok for (ok,) in self._group.gather_rows([well]))

    def _recovered(
        self, generation: Generation, shards: Sequence[Shard], own: Mapping[int, shard_file.Bytes] | None
    ) -> Recovered | None:
        whose = self._rank if self._rank < generation.shards else 0
        try:
            if own is None:
                return Recovered(assembled(shards), generation)
            for old, content in own.items():
                shard_file.check_own(shards[old].tail, content)
            takes = [old for old in own if takers(self._sources[generation], self._world_size)[old] == self._rank]
            states = [own_state(shards, old, own[old]) for old in takes]
            return Recovered(assembled(shards, whose, own[whose]), generation, states)
        except CheckpointError as error:
            self._passed_over(f"step {generation.step}: {error}")
            return None

    def _handed_out(self, generation: Generation, shards: Sequence[Shard]) -> dict[int, shard_file.Bytes]:
        """The own bytes, by rank of the run before, that this rank needs: its own, and of ranks that are no more."""
        sources = self._sources[generation]
        wanted = [(old, taker) for old, taker in enumerate(takers(sources, self._world_size))]
        wanted += [(0, new) for new in range(generation.shards, self._world_size) if (0, new) not in wanted]
        mine = {
            old: shard_file.own_of(self._content(generation, old))
            for old, source in sources.items()
            if source == self._rank
        }
        lengths = [len(mine[old]) if old in mine else 0 for old in range(generation.shards)]
        if self._group is not None:
            lengths = [max(known) for known in zip(*self._group.gather_rows(lengths), strict=True)]
        found = {}
        for old, taker in wanted:
            source, length = sources[old], lengths[old]
            if length > MAX_BYTES:
                raise BadInput(f"rank {source} would send {length} bytes; at most {MAX_BYTES} are taken")
            if self._rank == taker == source:
                found[old] = mine[old]
            elif self._group is not None and self._rank in (source, taker):
                content = self._group.hand_over(mine.get(old, np.empty(0, np.uint8)), source, taker, length)
                if self._rank == taker:
                    found[old] = content
        return found

    def _fetched(self, generation: Generation) -> list[Shard] | None:
        """What all ranks share, and what each shard says of its rank's own bytes."""
        shards, refused = [], None
        for index in range(generation.shards):
            source = self._sources[generation][index]
            content = shard_file.without_own(self._content(generation, index)) if source == self._rank else None
            if self._group is not None:
                content = self._group.broadcast_array(content, source, MAX_BYTES)
            try:
                shard = shard_file.parse(content if content is not None else np.empty(0, np.uint8), own=False)
                self._wanted.check(shard.header)
                _check_is(shard, generation, index)
                shards.append(shard)
            except CheckpointError as error:
                refused = refused or f"shard {index} of step {generation.step}, from rank {source}: {error}"
        if refused is None:
            return shards
        self._passed_over(refused)
        return None

    def _content(self, generation: Generation, index: int) -> shard_file.Bytes:
        """The file's bytes; none where it cannot be read any more, which every rank then sees alike."""
        try:
            return shard_file.content_of(self._own[generation, index].path)
        except CheckpointError as error:
            self._passed_over(str(error))
            return np.empty(0, np.uint8)

    def _decoded(self, rank: int, raw: bytes) -> Holdings:
        try:
            return decode(raw)
        except CheckpointError as error:
            self._passed_over(f"what rank {rank} says it holds: {error}")
            return []

    @property
    def _rank(self) -> int:
        return self._session.place.rank

    @property
    def _world_size(self) -> int:
        return self._session.place.world_size

    def _passed_over(self, why: str) -> None:
        self._session.notice(LEVEL_WARNING, f"rank {self._rank} passes over a checkpoint in memory: {why}")


def _check_is(shard: Shard, generation: Generation, index: int) -> None:
    """Raises CheckpointError where a peer sent something else than it said it holds."""
    found = Generation.of(shard)
    if (found, shard.tail.shard) != (generation, index):
        raise CheckpointError(
            f"it is shard {shard.tail.shard} of {found.shards}, of run {found.run}, step {found.step}, layout "
            f"{found.layout:.8}; asked for was shard {index} of {generation.shards}, of run {generation.run}, step "
            f"{generation.step}, layout {generation.layout:.8}"
        )


def encode(found: Sequence[WholeShard]) -> bytes:
    """The shards that this rank holds, for the others."""
    rows = [[g.generation.run, g.generation.step, g.generation.shards, g.generation.layout, g.shard] for g in found]
    return json.dumps(rows).encode()


def decode(raw: bytes) -> Holdings:
    """What `encode` gave on another rank. Raises CheckpointError."""
    try:
        rows = json.loads(raw) if len(raw) <= _MAX_HOLDINGS_BYTES else None
        if not isinstance(rows, list) or len(rows) > MAX_FILES:
            raise CheckpointError(f"{len(raw)} bytes are no list of at most {MAX_FILES} shards")
        holdings = []
        for run, step, shards, layout, shard in rows:
            numbers = (run, step, shards, shard)
            sound = all(type(number) is int and 0 <= number < 2**63 for number in numbers) and shard < shards
            if not sound or not isinstance(layout, str):
                raise CheckpointError(f"{(*numbers, layout)!r:.200} is no shard")
            holdings.append((Generation(run, step, shards, layout), shard))
        return holdings
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{len(raw)} bytes cannot be read: {error}") from error


def sources(holdings: Sequence[Holdings]) -> dict[Generation, dict[int, int]]:
    """For each generation, by shard, the lowest rank that holds it. holdings: by rank. Pure."""
    found: dict[Generation, dict[int, int]] = {}
    for rank, rows in enumerate(holdings):
        for generation, shard in rows:
            found.setdefault(generation, {}).setdefault(shard, rank)
    return found


def takers(found: Mapping[int, int], ranks: int) -> list[int]:
    """Who takes over what each rank of the run before had for itself: the same rank, or where that is no more, who has
    it here. found: of a complete generation, by shard, who holds it. Pure."""
    return [old if old < ranks else found[old] for old in range(len(found))]


def complete(found: Mapping[Generation, Mapping[int, int]]) -> list[Generation]:
    """Generations of which every shard is there, the newest first. Pure."""
    return sorted((g for g, by_shard in found.items() if len(by_shard) == g.shards), reverse=True)
