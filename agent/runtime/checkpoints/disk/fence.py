"""Keeps an older run's workers, which may live on unseen, from publishing beside a newer one's.

`DIRECTORY/fence` holds the newest run that wrote or read there, and of that run the newest view; they are compared and
raised under a lock. On shared file systems the lock must reach all nodes (NFS 4 does)."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors, replace_file
from atoll.errors import CheckpointError

LOCK_DEADLINE_S: Final = 30.0
_POLL_S: Final = 0.01


def take(directory: Path, run: int, view: int = 1) -> None:
    """Make `view` of `run` the newest of this directory (made if absent): what older ones publish from now on is
    refused.

    Raises CheckpointError if a newer run has it, the lock is not free in time, or the disk refuses."""
    with locked(directory):
        raise_fence(directory, run, view)


@contextmanager
def locked(directory: Path, deadline_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
    """Hold the directory's lock. It goes with the process, however that ends."""
    with disk_errors(f"opening the lock of {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(lock, directory, deadline_s)
        yield
    finally:
        os.close(lock)


def raise_fence(directory: Path, run: int, view: int = 1) -> None:
    """Do the work of `take`; the caller holds the lock."""
    newest, newest_view = _newest(directory)
    if newest == run and newest_view > view:
        raise CheckpointError(
            f"view {view} of run {run} was fenced by its view {newest_view}, which has taken {directory}. This worker "
            "was left out of it; it must end"
        )
    if newest > run:
        raise CheckpointError(
            f"run {run} was fenced by run {newest}, which has taken {directory}. This worker is of an older "
            "run; it must end"
        )
    if (newest, newest_view) < (run, view):
        replace_file(directory / "fence", f"{run} {view}\n".encode())


def newest_run(directory: Path) -> int:
    """Return the newest run that has taken this directory; -1 if none has. Raises CheckpointError."""
    return _newest(directory)[0]


def _newest(directory: Path) -> tuple[int, int]:
    """Run and view."""
    path = directory / "fence"
    try:
        with disk_errors(f"reading {path}"), path.open("rb") as file:
            text = file.read(64)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return -1, 1
        raise
    numbers = text.split()
    if len(numbers) != 2 or not all(one.isdigit() for one in numbers):
        raise CheckpointError(f"{path} holds {text!r}, not a run number. Remove it when no worker uses {directory}")
    return int(numbers[0]), int(numbers[1])


def _acquire(lock: int, directory: Path, deadline_s: float) -> None:
    ends_s = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise CheckpointError(
                    f"the lock of {directory} was not free within {deadline_s:g} s: another worker writes there, "
                    "or its file system hangs"
                ) from None
            time.sleep(_POLL_S)  # flock cannot wait with a deadline
        except OSError as error:
            raise CheckpointError(
                f"locking {directory} failed: {error.strerror}. Choose a directory whose file system has flock"
            ) from error
        else:
            return
