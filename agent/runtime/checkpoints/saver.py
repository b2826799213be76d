"""Writes checkpoints to disk when they are due, by the ranks that should; where that fails, training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from atoll.agent.runtime.agent_link.save_progress import progress
from atoll.agent.runtime.checkpoints.background_copy import BackgroundCopy
from atoll.agent.runtime.checkpoints.disk import fence, files, listing
from atoll.agent.runtime.checkpoints.disk.files import Share, shares
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.disk.header import Header, check_size
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.checkpoints.upload import Uploader
from atoll.agent.runtime.model.kept_tensors import MovedWhileRead
from atoll.agent.runtime.model.model_part import ModelPart
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.staging import staging_ring
from atoll.errors import CheckpointError
from atoll.v1.common_pb2 import LEVEL_ERROR, LEVEL_WARNING

LONGEST_WAIT_S: Final = 20.0
"""Seconds that a new checkpoint waits for the one before; after that it is left out."""
MAX_LAST_WRITE_S: Final = 600.0
"""Seconds that the end of training waits for a write in progress."""
MAX_RETRY_S: Final = 300.0
"""Seconds for which a disk that refuses the last checkpoint is tried again: its owner may free space meanwhile."""
RETRY_INTERVAL_S: Final = 5.0
"""Seconds between two tries."""
MAX_WAIT_IN_FORCE_S: Final = 60.0
"""Seconds that a write waits until its view is in force."""
IN_FORCE_INTERVAL_S: Final = 0.1
"""Seconds between two looks at whether it is."""
Packed = tuple[Header, Mapping[str, torch.Tensor], Any]  # header, tensors, scalars


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of an ordinary checkpoint that one rank writes: a shard, or all of it."""

    header: Header
    scalars: Any
    share: Share
    tensors: Callable[[], Mapping[str, torch.Tensor]]  # copies


class Saver:
    """Writes the snapshot of the last boundary: in the background every so many steps, at once where the worker leaves.

    Ordinary checkpoints are written by all ranks together, a shard each, where they reach one directory and have the
    same state; else by rank 0, and by the first rank of each node whose directory is another one. In an emergency any
    rank may write all of it: who else is alive is not known then. So is the last one, which counts most."""

    def __init__(self, session: Session, snapshot: Snapshot) -> None:
        self._session, self._snapshot = session, snapshot
        self._directory = session.checkpoint.directory
        self._writes, self._writers = False, 1
        self._copy: BackgroundCopy | None = None
        self._ring = staging_ring(session.device)  # of `_copy`
        self._awaited: Path | None = None  # to be uploaded once the last shard's writer has published it
        self._began_with: frozenset[Moment] = frozenset()
        self._written: Moment | None = None  # the newest by this rank
        self._uploader: Uploader | None = None
        self.seen_step = self._done_step = 0
        self._under_way: threading.Thread | None = None
        self._leaving = threading.Event()  # who saves on shall not try again
        self._failure: Exception | None = None  # of the last checkpoint

    @property
    def _part(self) -> ModelPart | None:
        return self._snapshot.part

    @property
    def enabled(self) -> bool:
        return self._directory is not None

    def begin(self, *, writes: bool, writers: int = 1, step: int, on_disk: Moment | None) -> None:
        """writes: whether ordinary checkpoints are this rank's. writers: ranks that reach one directory, if all do.
        step: where training begins; on_disk: what of that is saved."""
        self.share_work(writes=writes, writers=writers)
        self.seen_step = step
        self._done_step = on_disk.step if on_disk is not None else 0
        self._began_with = frozenset() if on_disk is None else frozenset([on_disk])
        if self._uploader is not None and (on_disk is not None or self._session.run > 1):
            self._uploader.wake()  # an emergency's may not have been uploaded, and older runs are fenced there

    def share_work(self, *, writes: bool, writers: int) -> None:
        """Share the work among the ranks of a view, as in `begin`."""
        self._writes = writes
        self._writers = writers if self._snapshot.durable.rolling() is None else 1  # else states differ
        self._awaited = None  # of ranks that may be gone
        settings, is_main = self._session.checkpoint, self._session.place.is_main
        if settings.store and settings.directory is not None and is_main and self._uploader is None:
            self._uploader = Uploader(
                settings.store,
                settings.directory,
                run=self._session.run,
                keep=settings.keep,
                keep_every_steps=settings.keep_every_steps,
                notify=self._session.notice,
            )

    def due(self, step: int) -> bool:
        """Return whether an ordinary checkpoint belongs to this boundary, on every rank alike."""
        every = self._session.checkpoint.every_steps
        return every > 0 and step // every > self.seen_step // every  # accumulation may step over the exact number

    def at_boundary(self, step: int) -> None:
        """Start a checkpoint if one is due. Waits for the one before, so that memory holds one copy at most; but not so
        long that the other ranks, who wait meanwhile, take this one for dead."""
        if self._uploader is not None and self._awaited is not None and self._awaited.exists():
            self._awaited = None
            self._uploader.wake()
        due = self.due(step)
        self.seen_step = step
        if due and self._directory is not None:
            self._start(self._directory, step)

    def save(self) -> Path | None:
        """A checkpoint of the last boundary, on disk when this returns; None where this rank writes none or cannot."""
        return self._save_at_once(writes=self._writes)

    def save_in_emergency(self) -> Path | None:
        """Save like `save`, by any rank: the first one of a directory writes, the others find its work done."""
        return self._save_at_once(writes=True)

    def begin_last(self) -> None:
        """Save like `save`, in the background. If the disk refuses, try again for a while."""
        self._wait_for_write()
        self._leaving.clear()
        self._run("atoll-checkpoint", self._save_patiently)

    def last_written_within(self, wait_s: float) -> bool:
        """Wait, and return whether the work of `begin_last` is over. Raises its errors, except CheckpointError."""
        if self._under_way is not None:
            self._under_way.join(timeout=wait_s)
            if self._under_way.is_alive():
                return False
            self._under_way = None
        if self._failure is not None:
            raise self._failure
        return True

    def leave_behind(self, why: str) -> None:
        """The checkpoint under way is not waited for any more."""
        self._under_way = None
        self._session.notice(LEVEL_WARNING, f"the last checkpoint is abandoned: {why}; the one before it stays")

    def check_packable(self) -> None:
        """Raises CheckpointError, naming the key, if a state dict holds what no checkpoint can."""
        if self._directory is not None:
            self._packed(copy=False)

    def loaded(self, *, brief_moments: bool = False) -> LoadedCheckpoint:
        """The last boundary's state, for a rank that lacks it. Its tensors are live on a CPU. brief_moments: those of
        the optimizer in 16 bits, for who needs not the very same; it widens them as it loads them."""
        return LoadedCheckpoint(*self._packed(copy=self._session.device.type != "cpu", brief_moments=brief_moments))

    def loaded_without_moments(self) -> LoadedCheckpoint:
        """Return the state like `loaded`, for a rank that has an optimizer's state of its own."""
        states = {name: state for name, state in self._snapshot.states(narrow=False).items() if name != "optimizer"}
        with self._snapshot.readable():
            return LoadedCheckpoint(self._header(), *pack_state(states, copy=self._session.device.type != "cpu"))

    def store_received(self, checkpoint: LoadedCheckpoint) -> None:
        """Keep what came from another machine, so that losing that one loses nothing."""
        if self._writes and self._directory is not None and checkpoint.path is None:
            try:
                files.write(
                    self._directory,
                    checkpoint.header,
                    checkpoint.tensors,
                    checkpoint.scalars,
                    as_run=self._session.run,
                )
            except CheckpointError as error:
                self._notice_failure(checkpoint.header.step, error)
            else:
                if self._uploader is not None:
                    self._uploader.wake()

    def uploaded_within(self, deadline_s: float) -> bool:
        """Wait, and return whether all that was written is in the object store, or was tried."""
        return self._uploader is None or self._uploader.idle_within(deadline_s)

    def upload_no_more(self) -> None:
        """Break off what is being uploaded."""
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None

    def close(self) -> None:
        """Wait for the checkpoint under way; break off what is being uploaded."""
        self._wait_for_write()
        self.upload_no_more()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        self._under_way = threading.Thread(target=work, name=name, daemon=True)
        self._under_way.start()

    def _wait_for_write(self) -> None:
        self._leaving.set()
        if self._under_way is not None:
            self._under_way.join(timeout=MAX_LAST_WRITE_S)
            if self._under_way.is_alive():
                self.leave_behind(f"it was not written within {MAX_LAST_WRITE_S:.0f} s")
            self._under_way = None

    def _start(self, directory: Path, step: int) -> None:
        if self._under_way is not None:
            if self._under_way.is_alive() and not self._session.in_force:
                return  # it waits for that, and training does not
            self._under_way.join(timeout=LONGEST_WAIT_S)
            if self._under_way.is_alive():
                text = f"checkpoint at step {step} is skipped: the one before is still being written; save less often"
                self._session.notice(LEVEL_WARNING, text)
                return
        try:
            own = self._snapshot.durable.own_writer(self._header(), copy=True)
            part = self._own_part()
        except CheckpointError as error:
            self._notice_failure(step, error)
            return
        if own is not None or part is not None:
            self._run("atoll-checkpoint", partial(self._write_all, directory, step, own, part))

    def wait_for_reads(self) -> None:
        """Wait until the state was copied, before it changes."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def _own_part(self) -> _Part | None:
        """Return this rank's part of an ordinary checkpoint."""
        if not self._writes and self._writers == 1:
            return None
        stands = self._snapshot.durable.rolling() is None  # until the next update; else it is copied here and now
        header, tensors, scalars = self._packed(copy=not stands)
        if self._part is not None:
            share = self._share_of_model(tensors) if self._part.writes else None
        else:
            found = shares(tensors, self._writers)
            shard = self._session.place.rank if len(found) > 1 else 0
            share = found[shard] if shard < len(found) and (len(found) > 1 or self._writes) else None
        if share is None:
            return None
        own = {name: tensor for name, tensor in tensors.items() if name in share.names}
        if not stands:
            return _Part(header, scalars, share, lambda: own)
        self._copy = BackgroundCopy(self._snapshot, own, self._session.device, self._ring)
        return _Part(header, scalars, share, self._copy.tensors)

    def _share_of_model(self, tensors: Mapping[str, torch.Tensor]) -> Share:
        """Return all that this rank has: a stage of the model, or the whole model."""
        if self._part is None:
            return Share(0, 1, frozenset(tensors), "")
        place = self._part.place
        return Share(place.stage, place.stages, frozenset(tensors), self._part.whole.digest)

    def _write_all(self, directory: Path, step: int, own: Callable[[], None] | None, part: _Part | None) -> None:
        copied: dict[str, torch.Tensor] = {}
        with progress.writing():
            well = part is not None and self._attempt(lambda: copied.update(part.tensors()), step)
            if not self._attempt(self._await_in_force, step):
                return
            if own is not None:
                self._attempt(own, step)
            if part is not None and well and self._attempt(lambda: self._write_part(directory, part, copied), step):
                self._tidy(directory)

    def _await_in_force(self) -> None:
        """Another view may yet be proposed in place of this one, whose members then know nothing of its steps. Raises
        CheckpointError."""
        link, session, ends_s = self._session.link, self._session, time.monotonic() + MAX_WAIT_IN_FORCE_S
        while link is not None and not link.wait_for(lambda: session.in_force, IN_FORCE_INTERVAL_S):
            if self._leaving.is_set() or time.monotonic() > ends_s:
                raise CheckpointError(f"view {session.view} of the run did not come into force meanwhile")

    def _write_part(self, directory: Path, part: _Part, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises CheckpointError."""
        if part.share.shards > 1:
            self._awaited = directory / part.header.name
        scalars = part.scalars if part.share.shard == 0 or self._part is not None else None
        self._write_share(directory, part.header, part.share, tensors, scalars)

    def _attempt(self, write: Callable[[], object], step: int) -> bool:
        try:
            write()
        except CheckpointError as error:
            self._notice_failure(step, error)
            return False
        return True

    def _save_at_once(self, *, writes: bool) -> Path | None:
        position = self._snapshot.position
        if self._directory is None or position is None:
            return None
        self._wait_for_write()
        try:
            return self._save_boundary(self._directory, position.step, writes=writes)
        except CheckpointError as error:
            self._notice_failure(position.step, error)
            return None

    def _save_patiently(self) -> None:
        position, ends_s, told = self._snapshot.position, time.monotonic() + MAX_RETRY_S, False
        while self._directory is not None and position is not None:
            try:
                self._save_boundary(self._directory, position.step, writes=self._writes)
            except CheckpointError as error:
                what = f"the last checkpoint, of step {position.step},"
                if not told:
                    told = True
                    text = f"{what} cannot be written: {error}. It is tried again for {MAX_RETRY_S / 60:.0f} minutes"
                    self._session.notice(LEVEL_ERROR, f"{text}, and all ranks wait for it")
                if time.monotonic() > ends_s or self._asked_to_stop() or self._leaving.wait(RETRY_INTERVAL_S):
                    self._session.notice(LEVEL_ERROR, f"{what} was not written: {error}")
                    return
            except Exception as error:  # noqa: BLE001 - of a state dict, the script's own: raised where it waits
                self._failure = error
                return
            else:
                return

    def _asked_to_stop(self) -> bool:
        return self._session.link is not None and self._session.link.stop is not None

    def _save_boundary(self, directory: Path, step: int, *, writes: bool) -> Path | None:
        """Write the state of the last boundary: this rank's own, then, if it writes, the shared one. Raises
        CheckpointError after both were tried."""
        if not self._session.in_force:
            raise CheckpointError(f"view {self._session.view} of the run is not in force, as far as this worker knows")
        failed: CheckpointError | None = None
        path: Path | None = None
        with progress.writing():
            try:
                own = self._snapshot.durable.own_writer(self._header(), copy=False)
                if own is not None:
                    own()
            except CheckpointError as error:
                failed = error
            if writes:
                path = self._write_once(directory, step)
        if failed is not None:
            raise failed
        if path is not None and self._writes:
            self._tidy(directory)
        return path

    def _write_once(self, directory: Path, step: int) -> Path | None:
        """Write unless another rank, or an earlier run, has done so."""
        lock = ".shutdown" if self._part is None else f".shutdown-{self._part.place.stage}"
        with fence.locked(directory / lock):  # so that a node's ranks do not all write the same bytes
            for found in listing.newest(directory):
                # One of this step by an older run counts only where this run began with it.
                if found.step == step and (found.run == self._session.run or found.step == self._done_step):
                    return found.path
            if step <= self._done_step:
                return None  # what this run began with, kept on another machine
            header, tensors, scalars = self._packed(copy=False)
            self._snapshot.check_unmoved()
            return self._write_share(directory, header, self._share_of_model(tensors), tensors, scalars)

    def _packed(self, *, copy: bool, brief_moments: bool = False) -> Packed:
        states = self._snapshot.states()
        with self._snapshot.readable():
            if brief_moments:
                optimizer = states["optimizer"]
                brief = tree_map_only(torch.Tensor, _brief, optimizer["state"])
                states = {**states, "optimizer": {**optimizer, "state": brief}}
            tensors, scalars = pack_state(states, copy=copy)
        check_size(sum(one.nbytes for one in tensors.values()), "the state")
        return self._header(), tensors, scalars

    def _header(self) -> Header:
        """Return the header of the last boundary."""
        return self._snapshot.header(self._session, self._snapshot.prepared)

    def _write_share(
        self, directory: Path, header: Header, share: Share, tensors: Mapping[str, torch.Tensor], scalars: Any
    ) -> Path | None:
        path = files.write_shard(directory, header, share, tensors, scalars)
        if path is not None:
            self._published(path, header.step)
        return path

    def _published(self, path: Path, step: int) -> None:
        self._done_step = step
        self._began_with, self._written = frozenset(), Moment.of(path.name)
        if self._session.link is not None:
            self._session.link.outbox.add(checkpoint_step=step)
        if self._uploader is not None:
            self._uploader.wake()

    def _tidy(self, directory: Path) -> None:
        try:
            settings = self._session.checkpoint
            listing.keep_newest(directory, settings.keep, settings.keep_every_steps, self._began_with, self._written)
        except CheckpointError as error:
            self._session.notice(LEVEL_WARNING, f"old checkpoints were not removed: {error}")

    def _notice_failure(self, step: int, error: CheckpointError) -> None:
        if isinstance(error, MovedWhileRead):
            self._session.notice(LEVEL_WARNING, f"checkpoint at step {step} is skipped: {error}")
            return
        text = f"checkpoint at step {step} failed: {error}; training continues. Free space or choose another directory"
        self._session.notice(LEVEL_ERROR, text)


def _brief(moment: torch.Tensor) -> torch.Tensor:
    """Counters stay as they are."""
    return moment.bfloat16() if moment.dtype == torch.float32 and moment.dim() > 0 else moment
