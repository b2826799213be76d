"""Output of workers, kept per rank on the controller's disk: two files of at most 10 MiB each.

Agents repeat what is not acknowledged, so each byte has an offset in its worker's output; an index beside the text says
which bytes of the file are which bytes of which run's output.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple, Unpack

from atoll.errors import BadInput
from atoll.message_limits import JOB_ID

logger = logging.getLogger(__name__)

FILE_BYTES: Final = 10 * 1024 * 1024
READ_BYTES: Final = 256 * 1024
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
_LOG_NAME: Final = re.compile(r"rank-(\d{1,4})\.log")


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Kept output. `offset` is of its first byte in the worker's output; None for a note that the controller made.
    `next_at`: where the next piece begins."""

    run: int
    offset: int | None
    data: bytes
    next_at: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """From position `at` on, the text is output of `run` from `offset` on (None: a note)."""

    at: int
    run: int
    offset: int | None


class RankLog:
    """One rank's output over all runs. Positions count from the first byte ever kept, over rotations."""

    def __init__(self, folder: Path, rank: int, file_bytes: int = FILE_BYTES) -> None:
        self._current = folder / f"rank-{rank}.log"
        self._older = folder / f"rank-{rank}.log.1"
        self._index = folder / f"rank-{rank}.index"
        self._file_bytes = file_bytes
        self._older_at = 0
        self._current_at = 0
        self._segments: list[_Segment] = []
        self._next: dict[int, int] = {}
        self._indexed = True
        """Whether the index on disk says what `_segments` says. Where it does not, no byte of output is written."""
        if self._index.exists():
            try:
                self._load()
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s was torn (%r): its text is kept, whose it is is no longer known", self._index, error)
                self._begin_anew()

    @property
    def begin(self) -> int:
        """The position of the oldest byte that is kept."""
        return self._older_at

    @property
    def end(self) -> int:
        return self._current_at + _size(self._current)

    def append(self, run: int, offset: int, data: bytes) -> int:
        """Keep `data`, which begins at `offset` of the worker's output. Returns the offset up to which all is kept.

        Bytes that are kept already are passed over; missing ones are noted in the text. Raises OSError.
        """
        expected = self._next.get(run, 0)
        if offset + len(data) <= expected:
            return expected
        if offset > expected:
            note = f"[atoll: {offset - expected} bytes of output are missing here]\n".encode()
            self._write(_Segment(self.end, run, None), note)
            expected = offset
        self._write(_Segment(self.end, run, expected), data[expected - offset :])
        self._next[run] = offset + len(data)
        return self._next[run]

    def read(self, at: int, limit: int = READ_BYTES) -> LogPiece | None:
        """What is kept from position `at` on (or from the oldest that is kept), at most `limit` bytes of one run."""
        at = max(at, self.begin)
        if at >= self.end or not self._segments:
            return None
        number = max(bisect_right(self._segments, at, key=lambda s: s.at) - 1, 0)
        segment = self._segments[number]
        stop = self._segments[number + 1].at if number + 1 < len(self._segments) else self.end
        path, file_at = self._file_of(at)
        if path is self._older:
            stop = min(stop, self._current_at)
        with path.open("rb") as file:
            file.seek(at - file_at)
            data = file.read(min(limit, stop - at))
        if not data:
            return None
        offset = None if segment.offset is None else segment.offset + at - segment.at
        return LogPiece(segment.run, offset, data, at + len(data))

    def tail(self, lines: int) -> int:
        """The position from which on the last `lines` lines are."""
        at, left = self.end, lines + 1  # the newline at the very end ends the last line, it begins none
        while at > self.begin:
            block_at = max(at - READ_BYTES, self._current_at if at > self._current_at else self._older_at)
            path, file_at = self._file_of(block_at)
            with path.open("rb") as file:
                file.seek(block_at - file_at)
                block = file.read(at - block_at)
            if at == self.end and not block.endswith(b"\n"):
                left -= 1
            position = len(block)
            while left and (position := block.rfind(b"\n", 0, position)) >= 0:
                left -= 1
            if not left:
                return block_at + position + 1
            at = block_at
        return self.begin

    def _file_of(self, at: int) -> tuple[Path, int]:
        """The file that holds position `at`, and the position of that file's first byte."""
        if at >= self._current_at:
            return self._current, self._current_at
        return self._older, self._older_at

    def _write(self, segment: _Segment, data: bytes) -> None:
        if self.end - self._current_at >= self._file_bytes:
            self._rotate()
        last = self._segments[-1] if self._segments else None
        goes_on = (
            last is not None
            and (last.run, last.offset is None) == (segment.run, segment.offset is None)
            and last.offset is not None
            and last.offset + segment.at - last.at == segment.offset
        )
        if not goes_on:
            self._segments.append(segment)
            self._indexed = False
        if not self._indexed:
            self._save()  # before the data: a size that does not grow any more is a segment without bytes
        size = _size(self._current)
        try:
            with self._current.open("ab") as file:
                file.write(data)
        except OSError:
            with suppress(OSError):  # half of it may be there, and all of it comes again
                os.truncate(self._current, size)
            raise

    def _rotate(self) -> None:
        end = self.end
        self._save(rotating=True)
        os.replace(self._current, self._older)
        self._moved(end)
        self._save()

    def _moved(self, end: int) -> None:
        """The current file has become the older one; what the older one held is gone."""
        self._older_at, self._current_at = self._current_at, end
        first = max(bisect_right(self._segments, self._older_at, key=lambda s: s.at) - 1, 0)
        self._segments = self._segments[first:]
        self._indexed = False

    def _save(self, rotating: bool = False) -> None:
        state = {
            "rotating": rotating,
            "older_at": self._older_at,
            "current_at": self._current_at,
            "segments": [[s.at, s.run, s.offset] for s in self._segments],
            "next": {str(run): offset for run, offset in self._next.items()},
        }
        fresh = self._index.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        os.replace(fresh, self._index)
        self._indexed = True

    def _begin_anew(self) -> None:
        self._older_at, self._current_at, self._next = 0, _size(self._older), {}
        self._segments = [_Segment(0, 0, None)] if self.end else []
        self._save()

    def _load(self) -> None:
        state = json.loads(self._index.read_text())
        self._older_at, self._current_at = state["older_at"], state["current_at"]
        self._segments = [_Segment(at, run, offset) for at, run, offset in state["segments"]]
        self._next = {int(run): offset for run, offset in state["next"].items()}
        if state["rotating"] and not self._current.exists():  # killed between the rename and the index
            self._moved(self._current_at + _size(self._older))
            self._save()
        stops = [s.at for s in self._segments[1:]] + [self.end]
        for segment, stop in zip(self._segments, stops, strict=True):
            if segment.offset is not None:
                kept = segment.offset + max(stop - segment.at, 0)
                self._next[segment.run] = max(self._next.get(segment.run, 0), kept)


async def run(disk: Executor, call: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments) -> Result:
    """Carry out what waits for the disk on the thread of logs: a slow disk must hold up no heartbeat."""
    return await asyncio.get_running_loop().run_in_executor(disk, call, *arguments)


class LogStore:
    """Logs of all jobs, under one folder: JOB/rank-N.log. Used, with all of its logs, by one thread alone."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._open: dict[tuple[str, int], RankLog] = {}

    def rank(self, job: str, rank: int) -> RankLog:
        """Raises BadInput for an id that is no job's, OSError."""
        found = self._open.get((job, rank))
        if found is None:
            folder = self._job(job)
            folder.mkdir(parents=True, exist_ok=True)
            found = self._open[job, rank] = RankLog(folder, rank, self._file_bytes)
        return found

    def ranks(self, job: str) -> list[int]:
        """The ranks of which anything is kept."""
        folder = self._job(job)
        if not folder.is_dir():
            return []
        return sorted(int(m[1]) for path in folder.iterdir() if (m := _LOG_NAME.fullmatch(path.name)))

    def remove(self, job: str) -> None:
        for key in [key for key in self._open if key[0] == job]:
            del self._open[key]
        shutil.rmtree(self._job(job), ignore_errors=True)

    def _job(self, job: str) -> Path:
        if not JOB_ID.fullmatch(job):
            raise BadInput(f"{job[:80]!r} is no job's id")
        return self._folder / job


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
