"""Checkpoints that this job has on no machine of its own: in its object store, or of the job that it starts from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from atoll.agent.runtime.checkpoints.disk import files
from atoll.agent.runtime.checkpoints.disk.folders import Moment, by_age, pick
from atoll.agent.runtime.checkpoints.disk.store import Store, answered
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.session.session import Session
from atoll.errors import CheckpointError, NotFound
from atoll.v1.common_pb2 import LEVEL_WARNING

START_RUN: Final = 0
"""What a job starts from counts as of the run before its first, whatever run of whichever job wrote it."""


class RemoteCheckpoints:
    """Checkpoints in the store as rank 0 sees it, and in the directory that the job starts from as each rank sees
    it."""

    def __init__(self, session: Session, directory: Path) -> None:
        """Asks the store, where there is one and an earlier run may have left something there."""
        self._session, self._directory = session, directory
        self._trouble = ""
        self.newest_in_store: Moment | None = None
        if session.checkpoint.store and session.place.is_main and session.run > 1:
            try:
                self.newest_in_store = answered(session.checkpoint.store, _newest_sound)
            except CheckpointError as error:
                self._trouble = str(error)
                session.notice(LEVEL_WARNING, f"the object store is not used: {error}")

    def bring(self, newest_on_disk: Callable[[], tuple[int, int]]) -> None:
        """Put the store's newest into rank 0's directory where no machine has one as new. newest_on_disk: of all ranks,
        collective. Raises CheckpointError where nothing is left but a store that cannot be read: that job must not
        begin anew as if it had never trained."""
        session = self._session
        if not session.checkpoint.store:
            return
        newest, sound = newest_on_disk(), self.newest_in_store
        if sound is not None and sound > newest:
            store = Store(session.checkpoint.store)
            for moment in sorted((one for one in store.list().whole if newest < one <= sound), reverse=True):
                try:
                    _, sealed = store.manifest(moment)
                    files.adopt(self._directory, sealed, partial(store.state, moment), session.run)
                except CheckpointError as error:
                    self._trouble = str(error)
                    session.notice(LEVEL_WARNING, f"a checkpoint of the object store cannot be used: {error}")
                else:
                    return
        if self._trouble and newest < (0, 0):
            raise CheckpointError(
                "no machine of this run has a checkpoint, and the object store, which may have one, gives none: "
                f"{self._trouble}"
            )

    def start(self) -> LoadedCheckpoint | None:
        """The checkpoint that the job was told to start from, as one of its own; None where this rank has it not.

        Collective. Raises CheckpointError where no rank has it, with what is there in its place."""
        session, start = self._session, self._session.checkpoint.start_from
        if start is None:
            return None
        own, trouble = None, "it lies in no directory of this machine"
        for directory, store in ((start.directory, ""), (None, start.store if session.place.is_main else "")):
            if own is None and (directory is not None or store):
                try:
                    own = load(directory, store, start.step, self._warn)
                except (CheckpointError, NotFound) as error:
                    trouble = str(error)
        there = [session.group.gather_rows([int(own is not None)])] if session.group is not None else []
        if own is None and not any(found for rows in there for (found,) in rows):
            wanted = "a checkpoint" if start.step is None else f"the checkpoint of step {start.step}"
            raise CheckpointError(
                f"this job is to start from {wanted}, which no machine of this run can read. "
                f"Rank {session.place.rank}: {trouble}"
            )
        if own is None:
            return None
        return LoadedCheckpoint(replace(own.header, job=session.job, run=START_RUN), own.tensors, own.scalars)

    def _warn(self, text: str) -> None:
        self._session.notice(LEVEL_WARNING, f"rank {self._session.place.rank} skips a checkpoint: {text}")


def _newest_sound(store: Store) -> Moment | None:
    """The newest whose manifest is sound."""
    for moment in sorted(store.list().whole, reverse=True):
        try:
            store.manifest(moment)
        except CheckpointError:
            continue
        return moment
    return None


def load(directory: Path | None, url: str, step: int | None, on_skip: Callable[[str], None]) -> LoadedCheckpoint:
    """Load the newest sound checkpoint, or the one of this step, from a directory or else from a store.

    on_skip is told what was passed over. Raises NotFound if there is none, CheckpointError if none is sound."""
    paths = by_age(directory) if directory is not None else {}
    moments: Collection[Moment] = paths if directory is not None else answered(url, Store.list).whole
    trouble: CheckpointError | None = None
    for moment in pick(moments, step, url if directory is None else str(directory)):
        try:
            if directory is not None:
                return files.read(paths[moment])
            store = Store(url)
            found, _ = store.manifest(moment)
            return files.read_opened(found, partial(store.opened, moment), f"{store.url}/{moment.name}")
        except CheckpointError as error:
            on_skip(str(error))
            trouble = trouble or error
    assert trouble is not None  # pick gave one at least
    raise trouble
