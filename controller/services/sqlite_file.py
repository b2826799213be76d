"""A SQLite file beside the controller."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


class SqliteFile:
    """Opened by its first use, on whose thread it stays. Its methods raise OSError where the disk is full or fails."""

    def __init__(self, path: Path, schema: str) -> None:
        self._path = path
        self._schema = schema
        self._opened: sqlite3.Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: all writes inside are kept, or none. An inner transaction is part of the outer one."""
        try:
            database = self._connection()
            if database.in_transaction:
                yield database
            else:
                with database:
                    yield database
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            try:
                self._opened = self._open()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:  # agents repeat what is not taken for ever
                aside = self._path.with_suffix(".torn")
                logger.warning("%s: %s; it is kept as %s and a new one is begun", self._path, error, aside)
                self._path.replace(aside)
                self._opened = self._open()
        return self._opened

    def _open(self) -> sqlite3.Connection:
        opened = sqlite3.connect(self._path)
        try:
            opened.execute("PRAGMA page_size = 16384")  # output comes by up to 128 KiB
            opened.execute("PRAGMA auto_vacuum = INCREMENTAL")
            opened.execute("PRAGMA journal_mode = WAL")
            opened.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may cost the last seconds
            opened.executescript(self._schema)
        except BaseException:
            opened.close()
            raise
        return opened
