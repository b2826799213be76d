"""Finds what earlier runs left in the machines' memory, and gives all ranks the same generation of it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, check_size
from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.checkpoints.memory.recovery.assembly import SharedState, assembled, own_state
from atoll.agent.runtime.checkpoints.memory.recovery.outside_shards import fetch_outside
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Bytes, Shard
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import (
    Generation,
    HeldShard,
    Resumable,
    decode,
    encode,
    whole_shards,
)
from atoll.agent.runtime.model.durable import OwnState
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.errors import CheckpointError
from atoll.v1.common_pb2 import LEVEL_WARNING


@dataclass(frozen=True, slots=True)
class Recovered:
    """State from which a run continues, for one rank. generation: set if it came from memory. own: the own states that
    this rank takes over then."""

    checkpoint: LoadedCheckpoint
    generation: Generation | None = None
    own: Sequence[OwnState] | None = None


class HeldGenerations:
    """The generations that all ranks together hold. Methods are collective and give the same on every rank."""

    def __init__(self, session: Session, folders: ShardFolders, model: Fingerprint, newest_run: int) -> None:
        """Look. A node's ranks share its folders, and the work of verifying it. newest_run: whose generations count.
        Raises PeerLost."""
        self._session, self._group = session, session.group
        self._wanted = Resumable(session.job, newest_run, model)
        part = (session.place.local_rank, session.place.local_world_size)
        try:
            found = whole_shards(folders, self._wanted, part, self._passed_over)
        except CheckpointError as error:
            self._passed_over(str(error))
            found = []
        self._folders = folders
        gathered = [encode(found)] if self._group is None else self._group.gather_bytes(encode(found))
        self._held = [self._decoded(rank, raw) for rank, raw in enumerate(gathered)]
        self._sources = sources(self._held)

    def bring(self, newer_than: tuple[int, int]) -> None:
        """Have the shards come here that the run lacks of a generation above `newer_than`, (run, step), from agents
        that hold them and have no part in it. Raises PeerLost."""
        if (memory := self._session.memory) is not None:
            fetched = fetch_outside(self._session, memory, self._wanted, self._sources, newer_than)
            gathered = [encode(fetched)] if self._group is None else self._group.gather_bytes(encode(fetched))
            self._held = [
                [*had, *self._decoded(r, raw)] for r, (had, raw) in enumerate(zip(self._held, gathered, strict=True))
            ]
            self._sources = sources(self._held)

    def newest_step(self) -> int | None:
        """Return the step of the newest generation whose shards are all there, even if it cannot be used."""
        return next((generation.step for generation in complete(self._sources)), None)

    def newest(self, newer_than: tuple[int, int], oldest: int = 0) -> Recovered | None:
        """The newest generation of which every shard is there, if its (run, step) is above `newer_than` and its step
        at least `oldest`. Raises PeerLost."""
        for generation in complete(self._sources):
            if (generation.run, generation.step) <= newer_than or generation.step < oldest:
                return None
            if (recovered := self._taken(generation)) is not None:
                return recovered
        return None

    def _taken(self, generation: Generation) -> Recovered | None:
        """None on all ranks where it cannot be used on one. In a method of its own, so that nothing of one generation
        is held while the next one is read."""
        here = self._here(generation)
        state = self._shared(generation, here)
        if not self._everywhere(state is not None) or state is None:
            return None
        differ = state.tails[0].own is not None
        try:
            own = self._handed_out(generation, here) if differ else {}
        except CheckpointError as error:
            self._passed_over(f"step {generation.step}: {error}")
            return None  # on every rank: all know the lengths
        recovered = self._recovered(generation, state, own if differ else None)
        return recovered if self._everywhere(recovered is not None) else None

    def _everywhere(self, well: bool) -> bool:
        """Return whether it went well on every rank."""
        return well if self._group is None else all(ok for (ok,) in self._group.gather_rows([well]))

    def _recovered(
        self, generation: Generation, state: SharedState, own: Mapping[int, Bytes] | None
    ) -> Recovered | None:
        whose = self._rank if self._rank < generation.shards else 0
        try:
            if own is None:
                return Recovered(assembled(state), generation)
            for old, content in own.items():
                shard_file.check_own(state.tails[old], content)
            takes = [old for old in own if takers(self._sources[generation], self._world_size)[old] == self._rank]
            states = [own_state(state, old, own[old]) for old in takes]
            return Recovered(assembled(state, whose, own[whose]), generation, states)
        except CheckpointError as error:
            self._passed_over(f"step {generation.step}: {error}")
            return None

    def _handed_out(self, generation: Generation, here: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """The own bytes, by rank of the run before, that this rank needs: its own, and of ranks that are no more."""
        sources = self._sources[generation]
        wanted = [(old, taker) for old, taker in enumerate(takers(sources, self._world_size))]
        wanted += [(0, new) for new in range(generation.shards, self._world_size) if (0, new) not in wanted]
        mine = {old: shard_file.own_of(content) for old, content in here.items()}
        rows = gathered_rows(self._group, [len(mine[old]) if old in mine else 0 for old in range(generation.shards)])
        found = {}
        for old, taker in wanted:
            length = max(row[old] for row in rows)
            check_size(length, f"what rank {old} kept for itself")
            source = taker if rows[taker][old] == length else min(r for r, row in enumerate(rows) if row[old] == length)
            if self._rank == taker == source:
                found[old] = mine.get(old, np.empty(0, np.uint8))
            elif self._group is not None and self._rank in (source, taker):
                content = self._group.hand_over(mine.get(old, np.empty(0, np.uint8)), source, taker, length)
                if self._rank == taker:
                    found[old] = content
        return found

    def _shared(self, generation: Generation, here: Mapping[int, Bytes]) -> SharedState | None:
        """Read the shared state and each shard's description of its rank's own bytes. Works shard by shard, so that
        beside the state at most one shard is held. here: contents of the files on this machine."""
        public = {index: len(content) - len(shard_file.own_of(content)) for index, content in here.items()}
        rows = gathered_rows(self._group, [public.get(index, 0) for index in range(generation.shards)])
        state, refused = SharedState(), ""
        for index in range(generation.shards):
            try:
                self._add(
                    state, generation, index, [row[index] for row in rows], here.get(index), useless=bool(refused)
                )
            except CheckpointError as error:
                refused = refused or f"shard {index} of step {generation.step}, {error}"
        if not refused:
            return state
        self._passed_over(refused)
        return None

    def _add(
        self, state: SharedState, generation: Generation, index: int, lengths: Sequence[int], here: Bytes | None,
        *, useless: bool,
    ) -> None:  # fmt: skip
        """Have the shard sent to the ranks that lack it, and take it. lengths: by rank, 0 where it is not.

        useless: another shard was refused, so this rank only hands it on. Raises CheckpointError, PeerLost."""
        length = max(lengths)
        check_size(length - shard_file.MAX_FRAME_BYTES, f"shard {index}")
        holders = [rank for rank, one in enumerate(lengths) if one == length > 0]
        if not holders:
            raise CheckpointError("which no rank can read any more")
        routes = deliveries(holders, self._machines, index)
        source = next((one for one, to in routes if to == self._rank), self._rank)
        content = here if source == self._rank else None
        if self._group is not None and routes:
            sent = None if content is None else self._sent(content, routes)
            received = self._group.distribute(sent, length, routes)
            content = received if content is None else content
        if useless or content is None:
            return
        try:
            shard = shard_file.parse(content, own=source == self._rank, own_unread=True)
            self._wanted.check(shard.header)
            _check_is(shard, generation, index)
            state.add(shard)
        except CheckpointError as error:
            raise CheckpointError(f"from rank {source}: {error}") from error

    def _sent(self, content: Bytes, routes: Sequence[tuple[int, int]]) -> Bytes:
        """Return the bytes that others get; none if this rank sends to no other."""
        if not any(source == self._rank for source, _ in routes):
            return np.empty(0, np.uint8)
        return shard_file.without_own(content)

    def _here(self, generation: Generation) -> dict[int, Bytes]:
        """The contents of this generation's files on this machine, where they lie, whichever rank verified them; by
        shard. Without those that cannot be read any more."""
        found = {}
        for rank, rows in enumerate(self._held):
            if self._machines[rank] != self._machines[self._rank]:
                continue
            for held in rows:
                path = self._folders.path(held.shard, generation.shards, held.slot)
                if held.generation == generation and held.shard not in found and path is not None:
                    try:
                        found[held.shard] = shard_file.sealed_part(shard_file.content_of(path))
                    except CheckpointError as error:
                        self._passed_over(str(error))
        return found

    @property
    def _machines(self) -> Sequence[Hashable]:
        """Return nodes by rank. Where they are not known, each rank has its own."""
        memory = self._session.memory
        known = memory is not None and len(memory.nodes) == self._world_size
        return memory.nodes if memory is not None and known else range(self._world_size)

    def _decoded(self, rank: int, raw: bytes) -> list[HeldShard]:
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
        self._session.notice(LEVEL_WARNING, f"rank {self._rank} skips a checkpoint in memory: {why}")


def _check_is(shard: Shard, generation: Generation, index: int) -> None:
    """Raises CheckpointError where a peer sent something else than it said it holds."""
    found = Generation.of(shard)
    if (found, shard.tail.shard) != (generation, index):
        raise CheckpointError(
            f"it is shard {shard.tail.shard} of {found.shards}, of run {found.run}, step {found.step}, layout "
            f"{found.layout:.8}; asked for was shard {index} of {generation.shards}, of run {generation.run}, step "
            f"{generation.step}, layout {generation.layout:.8}"
        )


def sources(holdings: Sequence[list[HeldShard]]) -> dict[Generation, dict[int, int]]:
    """Return for each generation, by shard, the lowest rank that holds it. holdings: by rank. Pure."""
    found: dict[Generation, dict[int, int]] = {}
    for rank, rows in enumerate(holdings):
        for held in rows:
            found.setdefault(held.generation, {}).setdefault(held.shard, rank)
    return found


def takers(found: Mapping[int, int], ranks: int) -> list[int]:
    """Return by old rank which rank takes over its own state: the same rank or, if that is gone, one that holds it.
    found: holders by shard, of a complete generation. Pure."""
    return [old if old < ranks else found[old] for old in range(len(found))]


def complete(found: Mapping[Generation, Mapping[int, int]]) -> list[Generation]:
    """Generations of which every shard is there, the newest first. Pure."""
    return sorted((g for g, by_shard in found.items() if len(by_shard) == g.shards), reverse=True)


def deliveries(holders: Collection[int], machines: Sequence[Hashable], turn: int = 0) -> list[tuple[int, int]]:
    """Plan how a shard comes to the ranks that lack it, over the network once for each machine: (from, to), in order.
    First it goes to one rank of each machine that lacks it, then from that rank to its mates. Pure.

    holders: ranks that can read it, at least one. machines: by rank. turn: of the shard among others, so that not the
    same ranks send first each time. Who has received it sends as well, so all have it after about log2 of the machines
    rounds."""
    by_machine: dict[Hashable, list[int]] = {}
    for rank, machine in enumerate(machines):
        by_machine.setdefault(machine, []).append(rank)
    have, at = sorted(holders), turn % len(holders)
    have = have[at:] + have[:at]
    lack = [ranks for ranks in by_machine.values() if not set(ranks) & set(have)]
    found = _doubling(have, [ranks[turn % len(ranks)] for ranks in lack])
    have += [to for _, to in found]
    for ranks in by_machine.values():
        found += _doubling([rank for rank in have if rank in ranks], [rank for rank in ranks if rank not in have])
    return found


def _doubling(have: Sequence[int], lack: Sequence[int]) -> list[tuple[int, int]]:
    """Send in rounds: in each round every rank that has it sends it to one that lacks it."""
    senders, found, left = list(have), [], list(lack)
    while left:
        pairs = list(zip(senders, left, strict=False))
        found += pairs
        senders += [to for _, to in pairs]
        left = left[len(pairs) :]
    return found
