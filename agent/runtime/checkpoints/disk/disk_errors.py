"""File operations that survive a crash, and the one place that translates the operating system's errors."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import CheckpointError


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Raise CheckpointError for OSError; the OSError is its __cause__."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing}: {error.strerror or error}.{_next_step(error)}") from error


def sync_folder(path: Path) -> None:
    """Make the names in this folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file so that after a crash it holds its old content or `content`, never a part. One writer at a
    time."""
    temporary = path.with_name(f".{path.name}.new")
    with disk_errors(f"writing {path}"):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def write_all(file: int, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _next_step(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return " Free some space or choose another checkpoint directory; older checkpoints are untouched"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Make the checkpoint directory writable for the worker's user"
    return ""
