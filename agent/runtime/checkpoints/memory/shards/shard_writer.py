"""Writes this rank's shards of generations, one after the other: a small one at once, a large one on its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Final

import torch

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import SlotFile, Tail, bounds
from atoll.agent.runtime.checkpoints.memory.shards.shard_state import ShardState
from atoll.agent.runtime.model.kept_tensors import MovedWhileRead
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.session.session import Session
from atoll.errors import CheckpointError, DeadlineExceeded, PeerLost

INLINE_BYTES: Final = 256 * 1024
"""Less is written on the training thread: waking another costs more."""
LONGEST_WAIT_S: Final = 60.0
"""Seconds that an update waits until its state was read."""
_NO_MODEL: Final = Fingerprint({})  # it is in the layout


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """One generation on its way into a slot."""

    step: int
    file: SlotFile
    tail: Tail


class ShardWriter:
    """All methods run on the training thread."""

    def __init__(
        self,
        session: Session,
        snapshot: Snapshot,
        shard: ShardState,
        *,
        inline: bool,
        written: Callable[[ShardWrite], None],
    ) -> None:
        """inline: small shards may be written on the training thread; not those that wait for other ranks. written:
        called when a shard is whole, by whichever thread wrote it."""
        self._session, self._snapshot, self._shard = session, snapshot, shard
        self._inline, self._written = inline, written
        self.done_step = 0
        """Of the newest generation that this rank has written."""
        self.failed: CheckpointError | None = None
        """Why a shard could not be written; who takes it sets None again."""
        self.moved: MovedWhileRead | None = None
        """Why the generation under way cannot be; the next one can. Who takes it sets None again."""
        self._asked = threading.Condition()
        self._writing: ShardWrite | None = None
        self._reading = False  # what the next update changes
        self._reading_clones = False
        self._worked_s = 0.0  # of processor time
        self._closing = self._late = False
        self._thread: threading.Thread | None = None

    def begin(self, step: int, file: SlotFile) -> None:
        """The state of this boundary goes into `file`; the shard has looked at it. Raises CheckpointError, PeerLost,
        DeadlineExceeded."""
        write = ShardWrite(step, file, self._tail())
        self._shard.begin(file)
        if write.tail.size <= INLINE_BYTES and self._inline:
            if self._read():
                self._complete(write)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="atoll-memory", daemon=True)
            self._thread.start()
        if not self._shard.apart:
            self._snapshot.reads_begin()
        with self._asked:
            self._writing, self._reading, self._reading_clones = write, not self._shard.apart, self._shard.apart
            self._asked.notify_all()

    def wait_for_reads(self) -> bool:
        """Wait until the state was read, before it changes. False if that takes too long; then no shard counts."""
        if self._thread is None:
            return True
        with self._asked:
            self._late = self._late or not self._asked.wait_for(lambda: not self._reading, LONGEST_WAIT_S)
        return not self._late

    def wait_for_clones(self) -> None:
        """Wait before the shard looks at another generation: clones of one that was given up may still be read. Raises
        CheckpointError."""
        with self._asked:
            if not self._asked.wait_for(lambda: not self._reading_clones, LONGEST_WAIT_S):
                raise CheckpointError(f"copying to memory took over {LONGEST_WAIT_S:.0f} s")

    def processor_s(self) -> float:
        """Return the processor time, in seconds, that the thread took since the last call."""
        with self._asked:
            worked_s, self._worked_s = self._worked_s, 0.0
        return worked_s

    def close(self) -> None:
        """Finish what is being written, then end the thread."""
        if self._thread is not None:
            with self._asked:
                self._closing = True
                self._asked.notify_all()
            self._thread.join(LONGEST_WAIT_S)
            self._thread = None

    def _tail(self) -> Tail:
        layout, place = self._shard.layout, self._session.place
        begin, end = bounds(layout.total, place.rank, place.world_size)
        header = asdict(self._snapshot.header(self._session, _NO_MODEL))
        return Tail(
            shard=place.rank,
            shards=place.world_size,
            begin=begin,
            size=end - begin,
            total=layout.total,
            header={name: value for name, value in header.items() if name != "model"},
            moving=self._shard.moving,
            own=self._shard.own,
        )

    def _run(self) -> None:
        if self._session.device.type == "cuda":
            torch.cuda.set_device(self._session.device)  # each thread has a current one of its own
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._writing is not None or self._closing)
                write = self._writing
            if write is None:
                return
            begun_s = time.thread_time()
            well = self._read()
            with self._asked:
                self._reading = self._reading_clones = False
                self._asked.notify_all()
            if well:
                self._complete(write)
            with self._asked:
                self._worked_s += time.thread_time() - begun_s
                if self._writing is write:  # the next one may have begun as soon as this one was known to be whole
                    self._writing = None

    def _read(self) -> bool:
        apart = self._shard.apart
        try:
            with nullcontext() if apart else self._snapshot.readable():
                self._shard.read()
            if not apart:
                self._snapshot.check_unmoved()
        except MovedWhileRead as error:
            self.moved = error
            return False
        except CheckpointError as error:
            self.failed = error
            return False
        except (PeerLost, DeadlineExceeded):
            return False  # training hears of it by itself
        return not self._late  # what was read too late is of two steps

    def _complete(self, write: ShardWrite) -> None:
        try:
            hashes = self._shard.complete(lambda: self._closing)
            if hashes is None:
                return
            write.file.seal(write.tail.sealed(*hashes))
        except CheckpointError as error:
            self.failed = error
        except DeadlineExceeded as error:
            self.failed = CheckpointError(f"step {write.step}: {error}")
        else:
            self.done_step = write.step
            self._written(write)
