"""Checkpoints that this job has on no machine of its own: in its object store, or of the job that it starts from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from atoll.agent.runtime.checkpoints.disk import files
from atoll.agent.runtime.checkpoints.disk.folders import Moment, by_age
from atoll.agent.runtime.checkpoints.disk.store import Store, answered
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.session.session import Session
from atoll.errors import CheckpointError
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
                session.notice(LEVEL_WARNING, f"the object store is left out: {error}")

    def bring(self, newest_on_disk: Callable[[], tuple[int, int]]) -> None:
        """Put the store's newest into rank 0's directory where no machine has one as new. newest_on_disk: of all ranks,
        collective. Raises CheckpointError where nothing is left but a store that cannot be read: that job must not
        begin anew as if it had never trained."""
        session = self._session
        if not session.checkpoint.store:
            return
        newest = newest_on_disk()
        if self.newest_in_store is not None and self.newest_in_store > newest:
            try:
                fetch(Store(session.checkpoint.store), self.newest_in_store, self._directory, session.run)
            except CheckpointError as error:
                self._trouble = str(error)
                session.notice(LEVEL_WARNING, f"the newest checkpoint of the object store cannot be used: {error}")
                self._bring_older(newest)
                return
        if self._trouble and newest < (0, 0):
            raise CheckpointError(
                f"no machine of this run has a checkpoint, and the object store, which may have one, does not answer: "
                f"{self._trouble}"
            )

    def _bring_older(self, newest: tuple[int, int]) -> None:
        store = Store(self._session.checkpoint.store)
        for moment in sorted(store.list().whole, reverse=True):
            if self.newest_in_store is not None and newest < moment < self.newest_in_store:
                try:
                    fetch(store, moment, self._directory, self._session.run)
                except CheckpointError as error:
                    self._session.notice(LEVEL_WARNING, f"an older one cannot be used either: {error}")
                else:
                    return
        if newest < (0, 0):
            raise CheckpointError(f"no checkpoint that can be used is left: {self._trouble}")

    def start(self) -> LoadedCheckpoint | None:
        """The checkpoint that the job was told to start from, as one of its own; None where this rank has it not.

        Collective. Raises CheckpointError where no rank has it, with what is there in its place."""
        session, start = self._session, self._session.checkpoint.start_from
        if start is None:
            return None
        own, trouble = _in_directory(start.directory, start.step, self._warn)
        if start.store and session.place.is_main and own is None:
            own, trouble = _in_store(start.store, start.step, self._warn)
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
        self._session.notice(LEVEL_WARNING, f"rank {self._session.place.rank} passes over a checkpoint: {text}")


def fetch(store: Store, moment: Moment, directory: Path, as_run: int) -> Path:
    """Copy a checkpoint out of the store, verified, into this directory. Raises CheckpointError."""
    _, sealed = store.manifest(moment)
    return files.adopt(directory, sealed, partial(store.state, moment), as_run)


def read(store: Store, moment: Moment) -> LoadedCheckpoint:
    """A checkpoint of the store, every byte verified. Raises CheckpointError."""
    found, _ = store.manifest(moment)
    return files.from_parts(found, partial(store.state, moment), f"{store.url}/{moment.name}")


def _newest_sound(store: Store) -> Moment | None:
    """The newest whose manifest is sound."""
    for moment in sorted(store.list().whole, reverse=True):
        try:
            store.manifest(moment)
        except CheckpointError:
            continue
        return moment
    return None


def _in_directory(
    directory: Path | None, step: int | None, on_skip: Callable[[str], None]
) -> tuple[LoadedCheckpoint | None, str]:
    """The checkpoint, or why there is none."""
    if directory is None:
        return None, "it lies in no directory of this machine"
    if step is None:
        found = files.newest_valid(directory, on_skip)
        return found, f"{directory} holds no checkpoint that can be used"
    paths = {moment: path for path in by_age(directory) if (moment := Moment.of(path.name))}
    trouble = f"{directory} has {steps_in_words(paths)}"
    for moment, path in paths.items():
        if moment.step == step:
            try:
                return files.read(path), ""
            except CheckpointError as error:
                trouble = str(error)
    return None, trouble


def _in_store(url: str, step: int | None, on_skip: Callable[[str], None]) -> tuple[LoadedCheckpoint | None, str]:
    try:
        present = sorted(answered(url, lambda store: store.list()).whole, reverse=True)
        wanted = [moment for moment in present if step in (None, moment.step)]
        trouble = f"{url} has {steps_in_words(present)}"
        for moment in wanted:
            try:
                return read(Store(url), moment), ""
            except CheckpointError as error:
                trouble = str(error)
                on_skip(trouble)
    except CheckpointError as error:
        return None, str(error)
    return None, trouble


def steps_in_words(present: Collection[Moment]) -> str:
    """'steps 200, 400', for an error."""
    steps = sorted({moment.step for moment in present})
    shown = ", ".join(str(step) for step in steps[-10:])
    more = f"{len(steps) - 10} older ones and " if len(steps) > 10 else ""
    return f"{more}step{'s' if len(steps) > 1 else ''} {shown}" if steps else "no checkpoint"
