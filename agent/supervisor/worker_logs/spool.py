"""Kept output of one worker on disk: two files of at most FILE_BYTES; the older is replaced when the newer is full."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

FILE_BYTES: Final = 10 * 1024 * 1024


class Spool:
    """Ring of two files. The output thread appends, the event loop reads. Positions count from the first byte ever
    appended."""

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        """Begins anew where files of that name exist. Raises OSError."""
        self._path = path
        self._older_path = path.with_name(path.name + ".1")
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._older: BinaryIO | None = None
        self._older_at = 0
        self._current_at = 0
        self._end = 0
        self._older_path.unlink(missing_ok=True)
        self._current: BinaryIO = path.open("w+b", buffering=0)

    @property
    def end(self) -> int:
        return self._end

    def append(self, data: bytes) -> None:
        """Raises OSError (disk full); then nothing of `data` counts as kept."""
        with self._lock:
            at = 0
            while at < len(data):
                room = self._file_bytes - (self._end - self._current_at)
                if room <= 0:
                    self._rotate()
                    continue
                at += self._write(data[at : at + room])

    def read(self, at: int, limit: int) -> tuple[int, bytes]:
        """Return (bytes after position `at` that are no longer kept, at most `limit` bytes after those)."""
        with self._lock:
            begin = max(at, self._older_at)
            if self._older is not None and begin < self._current_at:
                file, file_at, size = self._older, self._older_at, min(limit, self._current_at - begin)
            else:
                file, file_at, size = self._current, self._current_at, min(limit, self._end - begin)
            return begin - at, os.pread(file.fileno(), size, begin - file_at)

    def close(self) -> None:
        """The files stay."""
        with self._lock:
            for file in (self._older, self._current):
                if file is not None:
                    file.close()

    def _write(self, data: bytes) -> int:
        written = os.pwrite(self._current.fileno(), data, self._end - self._current_at)
        self._end += written
        return written

    def _rotate(self) -> None:
        os.replace(self._path, self._older_path)
        if self._older is not None:
            self._older.close()
        self._older, self._older_at = self._current, self._current_at
        self._current, self._current_at = self._path.open("w+b", buffering=0), self._end


def prune(folder: Path, keep: int, in_use: Iterable[Path] = ()) -> None:
    """Delete the oldest logs under `folder`, and empty folders of jobs, so that at most `keep` files are left."""
    used = {path.with_name(path.name + suffix) for path in in_use for suffix in ("", ".1")}
    files = sorted((path for path in folder.glob("*/run-*") if path not in used), key=lambda path: path.stat().st_mtime)
    for path in files[: max(0, len(files) + len(used) - keep)]:
        path.unlink(missing_ok=True)
    for job in folder.iterdir():
        if job.is_dir() and not any(job.iterdir()):
            job.rmdir()
