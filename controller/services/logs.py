"""Output of workers, kept in a SQLite file on the controller's disk: the newest 20 MiB of each rank.

Agents repeat what is not acknowledged, so each byte has an offset in its worker's output; each piece says of which run
it is, and where in that output it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple, Unpack

from atoll.controller.services.sqlite_file import SqliteFile

MOST_BYTES: Final = 20 * 1024 * 1024
READ_BYTES: Final = 256 * 1024
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS log (
  id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, rank INTEGER NOT NULL, UNIQUE (job, rank));
CREATE TABLE IF NOT EXISTS piece (
  log INTEGER NOT NULL, at INTEGER NOT NULL, run INTEGER NOT NULL, first INTEGER, data BLOB NOT NULL, UNIQUE (log, at));
CREATE TABLE IF NOT EXISTS kept (
  log INTEGER NOT NULL, run INTEGER NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (log, run)) WITHOUT ROWID;
"""
_STANDING: Final = """
SELECT id, coalesce((SELECT bytes FROM kept WHERE log = id AND run = :run), 0),
  coalesce((SELECT min(at) FROM piece WHERE log = id), 0),
  coalesce((SELECT at + length(data) FROM piece WHERE log = id ORDER BY at DESC LIMIT 1), 0)
FROM log WHERE job = :job AND rank = :rank
"""
_INSERT: Final = "INSERT INTO piece VALUES (?, ?, ?, ?, ?)"
_LOG: Final = "(SELECT id FROM log WHERE job = :job AND rank = :rank)"


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Kept output. `offset` is of its first byte in the worker's output; None for a note that the controller made.
    `next_at`: where the next piece begins."""

    run: int
    offset: int | None
    data: bytes
    next_at: int


class RankLog:
    """One rank's output over all runs. Positions count from the first byte ever kept. Its methods raise OSError."""

    def __init__(self, file: SqliteFile, job: str, rank: int, most_bytes: int = MOST_BYTES) -> None:
        self._file = file
        self._names = {"job": job, "rank": rank}
        self._most_bytes = most_bytes

    @property
    def begin(self) -> int:
        """The position of the oldest byte that is kept."""
        return self._number(f"SELECT min(at) FROM piece WHERE log = {_LOG}")

    @property
    def end(self) -> int:
        return self._number(f"SELECT at + length(data) FROM piece WHERE log = {_LOG} ORDER BY at DESC LIMIT 1")

    def append(self, run: int, offset: int, data: bytes) -> int:
        """Keep `data`, which begins at `offset` of the worker's output. Returns the offset up to which all is kept.

        Bytes that are kept already are passed over; missing ones are noted in the text.
        """
        with self._file.transaction() as database:
            asked = {**self._names, "run": run}
            number, kept, begin, end = database.execute(_STANDING, asked).fetchone() or (None, 0, 0, 0)
            if offset + len(data) <= kept:
                return int(kept)
            if number is None:
                number = database.execute("INSERT INTO log (job, rank) VALUES (:job, :rank)", asked).lastrowid
            if offset > kept:
                note = f"[atoll: {offset - kept} bytes of output are missing here]\n".encode()
                database.execute(_INSERT, (number, end, run, None, note))
                end, kept = end + len(note), offset
            fresh = data[kept - offset :]
            database.execute(_INSERT, (number, end, run, kept, fresh))
            database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", (number, run, offset + len(data)))
            if (oldest := end + len(fresh) - self._most_bytes) > begin:
                database.execute(
                    "DELETE FROM piece WHERE log = ? AND at < ? AND at + length(data) <= ?", (number, oldest, oldest)
                )
        return offset + len(data)

    def read(self, at: int, limit: int = READ_BYTES) -> LogPiece | None:
        """Return the output from position `at`, or from the oldest that is kept; at most `limit` bytes of one run."""
        at = max(at, self.begin)
        query = (
            f"SELECT at, run, first, data FROM piece WHERE log = {_LOG} AND "
            f"at >= (SELECT max(at) FROM piece WHERE log = {_LOG} AND at <= :at) ORDER BY at"
        )
        parts: list[bytes] = []
        whose: tuple[int, int | None] | None = None
        expected, size = 0, 0  # the offset at which the piece goes on; of its parts
        with self._file.transaction() as database:
            for began, run, first, data in database.execute(query, {**self._names, "at": at}):
                passed = max(at - began, 0)
                if passed >= len(data):
                    continue
                if whose is None:
                    whose = run, None if first is None else first + passed
                elif whose[1] is None or (run, first) != (whose[0], expected):
                    break
                parts.append(data[passed : passed + limit - size])
                size += len(parts[-1])
                if first is None or size == limit:
                    break
                expected = first + len(data)
        return None if whose is None else LogPiece(*whose, b"".join(parts), at + size)

    def tail(self, lines: int) -> int:
        """The position from which on the last `lines` lines are."""
        left, end = lines + 1, self.end  # the newline at the very end ends the last line, it begins none
        query = f"SELECT at, data FROM piece WHERE log = {_LOG} ORDER BY at DESC"
        with self._file.transaction() as database:
            for at, data in database.execute(query, self._names):
                if at + len(data) == end and not data.endswith(b"\n"):
                    left -= 1
                position = len(data)
                while left and (position := data.rfind(b"\n", 0, position)) >= 0:
                    left -= 1
                if not left:
                    return int(at + position + 1)
        return self.begin

    def _number(self, query: str) -> int:
        """The first column of the first row; 0 where there is none."""
        with self._file.transaction() as database:
            row = database.execute(query, self._names).fetchone()
        return int(row[0] or 0) if row else 0


async def run(disk: Executor, call: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments) -> Result:
    """Carry out what waits for the disk on the thread of logs: a slow disk must hold up no heartbeat."""
    return await asyncio.get_running_loop().run_in_executor(disk, call, *arguments)


class LogStore:
    """Logs of all jobs. Used, with all of its logs, by one thread alone. Its methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, SCHEMA)

    def rank(self, job: str, rank: int) -> RankLog:
        return RankLog(self._file, job, rank)

    def ranks(self, job: str) -> list[int]:
        """The ranks of which anything is kept."""
        with self._file.transaction() as database:
            return [rank for (rank,) in database.execute("SELECT rank FROM log WHERE job = ? ORDER BY rank", (job,))]

    def remove(self, job: str) -> None:
        with self._file.transaction() as database:
            for table in ("piece", "kept"):
                database.execute(f"DELETE FROM {table} WHERE log IN (SELECT id FROM log WHERE job = ?)", (job,))
            database.execute("DELETE FROM log WHERE job = ?", (job,))
        with self._file.transaction() as database:
            database.execute("PRAGMA incremental_vacuum").fetchall()

    def close(self) -> None:
        self._file.close()
