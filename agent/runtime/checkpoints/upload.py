"""Keeps an object store level with the directory where checkpoints are written first, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from atoll.agent.runtime.agent_link.save_progress import progress
from atoll.agent.runtime.checkpoints.disk import fence, listing
from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors
from atoll.agent.runtime.checkpoints.disk.folders import Moment, by_age
from atoll.agent.runtime.checkpoints.disk.listing import retained
from atoll.agent.runtime.checkpoints.disk.manifest import MANIFEST_FILE
from atoll.agent.runtime.checkpoints.disk.store import Listing, Store, StoreFence
from atoll.errors import CheckpointError
from atoll.v1.common_pb2 import LEVEL_ERROR, LEVEL_INFO, LEVEL_WARNING, Level

STOP_S: Final = 5.0


class Uploader:
    """One per job, on rank 0. What the store lacks is found out anew each time, so a failure needs no bookkeeping: the
    next checkpoint, or the next run, makes up for it. A run that lives on unseen is fenced where the store has
    conditional writes; else it stops by itself where the directory or the store shows a newer one."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        run: int,
        keep: int,
        keep_every_steps: int,
        notify: Callable[[Level.ValueType, str], None],
    ) -> None:
        """run: this one. notify: called on the uploader's thread when uploading begins to fail, when it works again,
        and when this run was fenced."""
        self._url, self._directory, self._run_number = url, directory, run
        self._keep, self._keep_every_steps = keep, keep_every_steps
        self._notify = notify
        self._lock = threading.Lock()
        self._again = self._running = self._failing = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sound: set[Moment] = set()  # there, their manifests read
        self._fence = StoreFence(run)
        self._begun = False

    def wake(self) -> None:
        """There may be something to upload."""
        with self._lock:
            self._again = True
            if not self._running and not self._stop.is_set():
                self._running = True
                self._thread = threading.Thread(target=self._run, name="atoll-upload", daemon=True)
                self._thread.start()

    def idle_within(self, deadline_s: float) -> bool:
        """Wait until all is uploaded, or tried. Returns whether it is."""
        ends_s = time.monotonic() + deadline_s
        while (thread := self._thread) is not None and thread.is_alive():
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return False
            thread.join(timeout=left_s)
        return True

    def close(self) -> None:
        """Break off between two parts of a file. A store that hangs keeps the thread; the process does not wait."""
        self._stop.set()
        if not self.idle_within(STOP_S):
            self._notify(LEVEL_ERROR, f"{self._url} did not answer within {STOP_S:.0f} s and is left behind")

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again or self._stop.is_set():
                    self._running = False
                    return
                self._again = False
            try:
                self._level()
            except CheckpointError as error:
                if not self._failing:
                    text = f"checkpoints are not uploaded: {error}. Training continues, the next one is tried again"
                    self._notify(LEVEL_ERROR, text)
                self._failing = True

    def _level(self) -> None:
        """Upload what shall be there and is not, the newest first; then remove what shall not be there any more."""
        store = Store(self._url)
        if not self._begun:
            self._may_seal(store)
            self._begun = True
            if self._fence.warning:
                text = f"{self._fence.warning}: a run that is cut off and lives on is noticed there, but not fenced"
                self._notify(LEVEL_WARNING, text)
        there = self._whole_there(store)
        here = by_age(self._directory)
        stay = retained({*here, *there}, self._keep, self._keep_every_steps)
        failed: CheckpointError | None = None
        for moment in sorted(stay & here.keys() - there, reverse=True):
            if self._stop.is_set():
                break
            try:
                if self._upload(store, here[moment]):
                    there.add(moment)
            except CheckpointError as error:  # one that is damaged here must not keep back the others
                failed = failed or error
        if self._stop.is_set():
            return
        self._tidy(store, there)
        if failed is not None:
            raise failed
        if self._failing:
            self._failing = False
            self._notify(LEVEL_INFO, f"checkpoints are uploaded to {self._url} again")

    def _whole_there(self, store: Store) -> set[Moment]:
        whole = self._list(store).whole
        self._sound &= whole.keys()
        for moment in whole.keys() - self._sound:
            try:
                found, _ = store.manifest(moment)
            except CheckpointError:
                continue  # torn: it is written again where it is still here, and does not count
            if found.state_bytes == whole[moment].state_bytes:
                self._sound.add(moment)
        return set(self._sound)

    def _upload(self, store: Store, path: Path) -> bool:
        try:
            with disk_errors(f"reading {path}"):
                sealed = (path / MANIFEST_FILE).read_bytes()
            listing.check_whole(path)
            uploaded = store.put(
                sealed, lambda name: _parts(path / name), self._stopped, partial(self._may_seal, store)
            )
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError) and not path.exists():
                return False  # retention was faster
            raise
        if uploaded and (moment := Moment.of(path.name)):
            self._sound.add(moment)
        return uploaded

    def _tidy(self, store: Store, there: set[Moment]) -> None:
        """`there` are sound, so the newest sound one stays. Older ones that lack a file are of dead writers. Those
        whose manifest could not be read are left alone: that may have been the network."""
        if not there:
            return
        stay = retained(there, self._keep, self._keep_every_steps)
        for moment in (there | self._list(store).torn) - stay:
            if moment < max(there) and not self._stop.is_set():
                store.remove(moment)
                self._sound.discard(moment)

    def _list(self, store: Store) -> Listing:
        found = store.list()
        newest = max((moment.run for moment in found.whole.keys() | found.torn), default=0)
        self._stop_if_fenced(max(newest, self._fence.newest_run(store)))
        return found

    def _stopped(self) -> bool:
        """Asked between two parts of a file."""
        self._stop_if_fenced(fence.newest_run(self._directory))
        return self._stop.is_set()

    def _may_seal(self, store: Store) -> bool:
        self._stop_if_fenced(self._fence.advance(store))
        return not self._stop.is_set()

    def _stop_if_fenced(self, newest_run: int) -> None:
        if newest_run > self._run_number and not self._stop.is_set():
            self._stop.set()
            text = f"run {self._run_number} uploads no more: it was fenced by run {newest_run}"
            self._notify(LEVEL_WARNING, text)


def _parts(file: Path) -> Iterator[memoryview]:
    with disk_errors(f"reading {file}"):
        for part in listing.parts(file):
            yield part
            progress.add(len(part))
