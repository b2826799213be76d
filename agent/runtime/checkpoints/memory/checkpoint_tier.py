"""Begins generations of checkpoints in memory, and has this rank's shard of each written and copied."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import zmq
from humanize import naturalsize

from atoll.agent.runtime.channel.agreement import MemoryProgress
from atoll.agent.runtime.channel.membership import data_keys, host
from atoll.agent.runtime.checkpoints.memory.cost.cadence import ABANDON, OFF, Cadence, CadenceNotice, Contention
from atoll.agent.runtime.checkpoints.memory.cost.state_size import StateBytes
from atoll.agent.runtime.checkpoints.memory.replication.replica_placement import ReplicaPlacement
from atoll.agent.runtime.checkpoints.memory.replication.replica_sender import ReplicaSender
from atoll.agent.runtime.checkpoints.memory.replication.replica_transfer import ReplicaTransfer
from atoll.agent.runtime.checkpoints.memory.shards.shard_state import BoundaryShard, RollingShard, ShardState
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation, ShardFiles
from atoll.agent.runtime.checkpoints.memory.shards.shard_writer import LONGEST_WAIT_S, ShardWrite, ShardWriter
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.session.session import MemorySettings, Session
from atoll.agent.runtime.staging import staging_ring
from atoll.agent.runtime.transport.keys import KEY_BYTES
from atoll.agent.runtime.transport.meter import LinksInUse
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.errors import AtollError, CheckpointError, DeadlineExceeded, PeerLost
from atoll.v1.common_pb2 import LEVEL_INFO, LEVEL_WARNING

_MAX_LAYOUT_BYTES: Final = 128 << 20
"""Bytes that a copy may be longer than the state itself: layout and tail."""


class CheckpointTier:
    """Checkpoints in memory of one rank. Called on the training thread at boundaries; another thread copies.

    All ranks begin a generation at the same boundary. It is in progress until each rank has reported, in the agreement
    that every step makes, that it has written its shard. Only then the next one begins, over the one before it."""

    def __init__(self, session: Session, snapshot: Snapshot, links_in_use: Callable[[], LinksInUse | None]) -> None:
        """links_in_use: the exchange's connections, from any thread."""
        self._session, self._snapshot, self._links_in_use = session, snapshot, links_in_use
        self._memory = session.memory
        self._placement = ReplicaPlacement.of(session)
        self._sender: ReplicaSender | None = None
        place, rolling, ring = session.place, snapshot.durable.rolling(), staging_ring(session.device)
        self._shard: ShardState = (
            BoundaryShard(snapshot, place.rank, place.world_size, ring, view=session.view)
            if rolling is None
            else RollingShard(snapshot, rolling, place.rank, place.world_size, ring, view=session.view)
        )
        self._writer = ShardWriter(session, snapshot, self._shard, inline=rolling is None, written=self._copy)
        self._cadence = Cadence()
        self._on_disk: frozenset[int] = frozenset()  # ranks whose own shard has no room in memory
        self._files: ShardFiles | None = None
        self._current = 0  # step of the generation in progress; 0: none
        self.complete_step = 0
        """Of the newest generation that all ranks have written."""
        self._begun_step = 0  # of the newest generation that began
        self._news = CadenceNotice()
        self._boundary_s = 0.0
        self._stalled_s = 0.0  # for which the generation under way has held training up so far
        self._contention = Contention()
        self._others_there = True  # files of other shapes of the run may be in the folder

    @property
    def enabled(self) -> bool:
        return self._memory is not None

    def start(self, step: int, restored: Generation | None, state: StateBytes, *, complete_step: int = 0) -> None:
        """Training begins at `step`. restored: what it goes on from, where that came from memory. complete_step: of the
        run's newest generation that this rank knows to be complete. Collective; raises PeerLost."""
        if self._memory is None:
            return
        self._begun_step = step
        place, incoming = self._session.place, dict[int, ShardFiles]()
        complete = self._session.run, self._place_shards(self._memory, state, complete_step)
        newest = complete if restored is None else (restored.run, restored.step)
        try:
            self._check_room(self._memory, state)
            incoming = {
                shard: ShardFiles(
                    self._memory.folders.slots(shard, place.world_size, on_disk=shard in self._on_disk & {place.rank}),
                    newest,
                    self._make_room,
                )
                for shard in (place.rank, *self._placement.owners)
            }
            self._files = incoming.pop(place.rank)
        except CheckpointError as error:
            self._turn_off(str(error))
        if self._placement.any and self._session.group is not None:
            limit_bytes = 2 * (state.shared + state.own) + _MAX_LAYOUT_BYTES
            self._sender, why = connected_sender(
                self._session, self._placement, incoming, limit_bytes, self._links_in_use
            )
            if why:
                self._turn_off(why)

    def progress(self) -> MemoryProgress:
        """Return what the other ranks need to know of this one."""
        self._take_failure()
        copied = self._sender.done_step if self._sender is not None else None
        done = self._writer.done_step if copied is None else min(self._writer.done_step, copied)
        every = self._cadence.every if self._writer.moved is None else ABANDON
        return MemoryProgress(done, every if self.enabled else OFF)

    def copied_beside(self) -> Mapping[int, int]:
        """Bytes of copies that links carried while the exchange was busy, by peer. From any thread."""
        sender = self._sender
        return dict(sender.copied_beside) if sender is not None else {}

    def pause(self) -> None:
        """Training is about to send."""
        if self._sender is not None:
            self._sender.pause()

    def resume(self) -> None:
        """The links are idle again."""
        if self._sender is not None:
            self._sender.resume()

    def at_boundary(self, agreed: MemoryProgress) -> int | None:
        """The snapshot was taken. agreed: the least that any rank has written, the longest period that any wants.
        Returns the step that is newly complete on all ranks, None where there is none."""
        position = self._snapshot.position
        if not self.enabled or position is None:
            return None
        begun_s = time.monotonic()
        if self._sender is not None:
            self._sender.boundary()
        if agreed.every >= OFF:
            self._turn_off("another rank cannot write its part")
            return None
        if agreed.every == ABANDON:
            self._abandon()
            return None
        if self._boundary_s and position.step > self._begun_step:
            self._cadence.stepped(begun_s - self._boundary_s)
        complete = self._completed(agreed.step)
        self._announce(agreed.every)
        self._boundary_s = begun_s
        if self._current == 0 and position.step - self._begun_step >= agreed.every:
            self._stalled_s = 0.0
            self._begin(position.step)
            self._stalled_s += time.monotonic() - begun_s
        return complete

    def wait_for_reads(self) -> None:
        """Wait until the state was read, before it changes. Raises nothing: `progress` reports a failure."""
        begun_s = time.monotonic()
        if not self._writer.wait_for_reads():
            self._turn_off(f"copying to memory took over {LONGEST_WAIT_S:.0f} s")
        self._stalled_s += time.monotonic() - begun_s

    def close(self) -> None:
        """Finish what is being written, then end the thread."""
        self._writer.close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._files is not None:
            self._files.close()
            self._files = None

    def _completed(self, agreed_step: int) -> int | None:
        if self._current == 0 or agreed_step < self._current or self._files is None:
            return None
        complete = self.complete_step = self._current
        self._current = 0
        self._files.turn()
        self._cadence.wrote(self._stalled_s + self._processors_s() + self._links_s())
        if self._session.place.local_rank == 0:
            self._make_room()
        return complete

    def _processors_s(self) -> float:
        """Return by how many seconds processors that copied the complete generation kept training waiting."""
        if self._session.device.type != "cpu":
            return 0.0
        copied_s = self._sender.processor_s() if self._sender is not None else 0.0
        return self._contention.share() * (self._writer.processor_s() + copied_s)

    def _links_s(self) -> float:
        """Return by how many seconds copies of the complete generation delayed exchanges of training."""
        return self._sender.delay_s() if self._sender is not None else 0.0

    def _begin(self, step: int) -> None:
        assert self._files is not None
        try:
            self._writer.wait_for_clones()
            self._shard.look()
            file = self._files.next()
            self._current = self._begun_step = step
            self._writer.begin(step, file)
        except CheckpointError as error:
            self._turn_off(str(error))
        except (PeerLost, DeadlineExceeded):
            pass  # training hears of it by itself

    def _copy(self, write: ShardWrite) -> None:
        """This rank's shard is whole. By whichever thread wrote it."""
        if self._sender is not None and self._sender.sends:
            self._sender.send(ReplicaTransfer(write.step, write.file.path, write.file.content_bytes))

    def _place_shards(self, memory: MemorySettings, state: StateBytes, complete_step: int) -> int:
        """Each where it fits: a machine with little room leaves copies to others, and has its own shard on disk.
        Returns the highest complete_step of all ranks: who joins knows of none. Collective; raises PeerLost."""
        place = self._session.place
        room = 0 if memory.folder is None else memory.room_bytes
        mine = [room, state.of_slots(place.world_size), complete_step]
        rooms, needed, complete = zip(*gathered_rows(self._session.group, mine), strict=True)
        self._on_disk = frozenset(rank for rank in range(place.world_size) if needed[rank] > rooms[rank])
        self._placement, said = self._placement.fitted(rooms, needed)
        if place.is_main:
            for text in said:
                self._session.notice(LEVEL_WARNING, text)
        return int(max(complete))

    def _check_room(self, memory: MemorySettings, state: StateBytes) -> None:
        """Says where the own shard lies on disk. Raises CheckpointError with figures where it will not fit there."""
        rank = self._session.place.rank
        if rank not in self._on_disk:
            return
        needed = state.of_slots(self._session.place.world_size)
        there = "its agent could not make a folder there"
        if memory.folder is not None:
            there = f"{naturalsize(memory.room_bytes)} are free in {memory.folder}"
        figures = (
            f"they take {naturalsize(needed)} on this machine for rank {rank} (its part of {naturalsize(state.shared)} "
            f"and {naturalsize(state.own)} of its own, two generations), and {there}"
        )
        if memory.disk_folder is None or needed > memory.disk_room_bytes:
            on_disk = f"{naturalsize(memory.disk_room_bytes)} on its disk"
            raise CheckpointError(f"{figures}, {on_disk}. Free memory or use more machines")
        text = (
            f"checkpoints in memory: {figures}. They are files in {memory.disk_folder} instead, and cost that disk its"
        )
        self._session.notice(LEVEL_WARNING, f"{text} writes. Free memory or use more machines")

    def _make_room(self) -> bool:
        """Remove the shards of runs of another shape: a generation is complete without them, or cannot be while they
        are there. Also by the threads that write; whether there were any, as far as is known."""
        there, self._others_there = self._others_there, False
        if there and self._memory is not None:
            try:
                on_disk = self._on_disk & self._placement.own_here
                kept = {shard: shard in on_disk for shard in self._placement.here}
                self._memory.folders.remove_others(kept, self._session.place.world_size)
            except CheckpointError as error:
                self._session.notice(LEVEL_WARNING, str(error))
        return there

    def _abandon(self) -> None:
        """The generation in progress is of two steps on some rank: all give it up, and the one before it stays."""
        moved, self._writer.moved = self._writer.moved, None
        if moved is not None:
            self._session.notice(LEVEL_WARNING, f"checkpoint in memory of step {self._current} is dropped: {moved}")
        self._current = 0
        self._boundary_s = 0.0

    def _announce(self, every: int) -> None:
        if self._news.changed(every) and self._session.place.is_main:
            text = (
                f"the state is copied to memory every {every} steps from now on: a copy costs training "
                f"{1000 * self._cadence.cost_s:.2f} ms here, a step takes {1000 * self._cadence.step_s:.1f} ms"
            )
            self._session.notice(LEVEL_INFO, text)

    def _take_failure(self) -> None:
        failed, self._writer.failed = self._writer.failed, None
        if failed is None and self._sender is not None:
            failed, self._sender.failed = self._sender.failed, None
        if failed is not None:
            self._turn_off(str(failed))

    def _turn_off(self, why: str) -> None:
        """Turn the tier off, on all ranks at the step after the one that tells them."""
        if self._memory is None:
            return
        self._memory = None
        self._current = 0
        text = f"no checkpoints in memory: {why}. Those on disk are written as requested; training continues"
        self._session.notice(LEVEL_WARNING, text)


_MAX_HELLO_BYTES: Final = 256


def connected_sender(
    session: Session,
    placement: ReplicaPlacement,
    incoming: Mapping[int, ShardFiles],
    limit_bytes: int,
    links_in_use: Callable[[], LinksInUse | None],
) -> tuple[ReplicaSender | None, str]:
    """This rank's sender, connected; or why there is none, on every rank or, where another sent a key that is none,
    here. Collective; raises PeerLost."""
    assert session.group is not None
    sender = ReplicaSender(
        run=session.incarnation,
        rank=session.place.rank,
        keys=data_keys(session),
        incoming=incoming,
        limit_bytes=limit_bytes,
        notify=lambda text: session.notice(LEVEL_WARNING, text),
        links_in_use=links_in_use,
    )
    try:
        hello, why = sender.bind(host(session)), ""
    except zmq.ZMQError as error:
        hello, why = b"", str(error)
    hellos = [one[:_MAX_HELLO_BYTES] for one in session.group.gather_bytes(hello)]
    silent = [rank for rank, one in enumerate(hellos) if not one[KEY_BYTES:].startswith(b"tcp://")]
    if silent:
        sender.close()
        return None, f"rank {silent[0]} cannot listen for copies of others' state {why}".rstrip()
    links = session.links
    if links is not None:
        for holder in placement.holders:
            key, endpoint = hellos[holder][:KEY_BYTES], hellos[holder][KEY_BYTES:].decode(errors="replace")
            hellos[holder] = key + links.endpoint(holder, endpoint).encode()
    try:
        sender.start(hellos, placement.holders)
    except AtollError as error:
        sender.close()
        return None, str(error)
    return sender, ""
