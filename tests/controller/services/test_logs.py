from __future__ import annotations

from pathlib import Path

import pytest

from atoll.controller.services.logs import MOST_BYTES, SCHEMA, LogStore, RankLog
from atoll.controller.services.sqlite_file import SqliteFile


def made(folder: Path, most_bytes: int = MOST_BYTES) -> RankLog:
    return RankLog(SqliteFile(folder / "logs.sqlite3", SCHEMA), "vit-3f9a", 0, most_bytes)


def text(log: RankLog, at: int | None = None) -> bytes:
    parts, position = [], log.begin if at is None else at
    while piece := log.read(position, limit=7):
        parts.append(piece.data)
        position = piece.next_at
    return b"".join(parts)


def pieces(log: RankLog) -> list[tuple[int, int | None, bytes]]:
    found, position = [], log.begin
    while piece := log.read(position):
        found.append((piece.run, piece.offset, piece.data))
        position = piece.next_at
    return found


def test_output_is_kept_once_however_often_it_is_sent(tmp_path: Path) -> None:
    log = made(tmp_path)
    assert log.append(1, 0, b"hello ") == 6
    assert log.append(1, 0, b"hello ") == 6
    assert log.append(1, 3, b"lo world") == 11
    assert log.append(1, 4, b"o") == 11
    assert pieces(log) == [(1, 0, b"hello world")]


def test_missing_bytes_are_noted(tmp_path: Path) -> None:
    log = made(tmp_path)
    log.append(1, 0, b"begin\n")
    assert log.append(1, 106, b"end\n") == 110
    assert pieces(log) == [
        (1, 0, b"begin\n"),
        (1, None, b"[atoll: 100 bytes of output are missing here]\n"),
        (1, 106, b"end\n"),
    ]


def test_late_words_of_an_older_run_are_kept_apart(tmp_path: Path) -> None:
    log = made(tmp_path)
    log.append(1, 0, b"one ")
    log.append(2, 0, b"two ")
    assert log.append(1, 4, b"late ") == 9
    assert log.append(2, 4, b"more ") == 9
    assert pieces(log) == [(1, 0, b"one "), (2, 0, b"two "), (1, 4, b"late "), (2, 4, b"more ")]


def test_a_restarted_controller_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = made(tmp_path)
    first.append(1, 0, b"one ")
    first.append(1, 9, b"two ")
    again = made(tmp_path)
    assert again.append(1, 9, b"two three") == 18
    assert text(again) == text(made(tmp_path))
    assert text(again).endswith(b"two three")


def test_the_newest_bytes_are_kept(tmp_path: Path) -> None:
    log = made(tmp_path, most_bytes=200)
    for i in range(200):
        log.append(1, 10 * i, b"line %04d\n" % i)
    assert text(log) == b"".join(b"line %04d\n" % i for i in range(180, 200))
    first = log.read(0)
    assert first is not None
    assert (first.run, first.offset) == (1, 1800)
    again = made(tmp_path, most_bytes=200)
    assert again.append(1, 0, b"x" * 2000) == 2000
    assert text(again) == text(log)


def test_after_a_full_disk_nothing_is_there_by_half_and_all_of_it_is_taken_again(tmp_path: Path) -> None:
    """1. The disk is full in the middle of a batch of run 2. 2. Nothing of it is kept, and no byte counts as another
    run's. 3. Space is freed, the agent repeats the batch, and it is there once."""
    log = made(tmp_path)
    log.append(1, 0, b"one ")
    file = log._file
    with file.transaction() as database:
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match="database or disk is full"):
        log.append(2, 5, b"two " * 20_000)
    assert pieces(log) == [(1, 0, b"one ")]
    with file.transaction() as database:
        database.execute("PRAGMA max_page_count = 1000000")
    assert log.append(2, 0, b"two ") == 4
    assert pieces(made(tmp_path)) == [(1, 0, b"one "), (2, 0, b"two ")]
    assert made(tmp_path).append(1, 4, b"late") == 8, "run 1 has written no more than it did"


@pytest.mark.parametrize(
    ("written", "lines", "expected"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"\n\n\n", 1, b"\n"),
        (b"no line at all", 1, b"no line at all"),
    ],
)
def test_the_last_lines(tmp_path: Path, written: bytes, lines: int, expected: bytes) -> None:
    log = made(tmp_path)
    log.append(1, 0, written)
    assert text(log, log.tail(lines)) == expected


def test_the_last_lines_over_several_pieces(tmp_path: Path) -> None:
    log = made(tmp_path)
    for i in range(5):
        log.append(1, 10 * i, b"line %04d\n" % i)
    assert text(log, log.tail(3)) == b"line 0002\nline 0003\nline 0004\n"


def test_nothing_is_read_from_an_empty_log(tmp_path: Path) -> None:
    log = made(tmp_path)
    assert (log.read(0), log.tail(5), log.begin, log.end) == (None, 0, 0, 0)


def test_logs_of_jobs_lie_apart_and_are_removed_together(tmp_path: Path) -> None:
    logs = LogStore(tmp_path / "logs.sqlite3")
    logs.rank("one-1", 0).append(1, 0, b"x")
    logs.rank("one-1", 11).append(1, 0, b"x")
    logs.rank("two-2", 0).append(1, 0, b"y")
    assert (logs.ranks("one-1"), logs.ranks("two-2"), logs.ranks("none-0")) == ([0, 11], [0], [])
    logs.remove("one-1")
    assert (logs.ranks("one-1"), logs.ranks("two-2")) == ([], [0])
    assert text(logs.rank("one-1", 0)) == b""
    assert text(logs.rank("two-2", 0)) == b"y"


def test_a_torn_file_is_put_aside_and_a_new_one_takes_what_comes(tmp_path: Path) -> None:
    """An agent repeats its output for ever, so it must be taken."""
    made(tmp_path).append(1, 0, b"before\n")
    for path in tmp_path.glob("logs.sqlite3*"):
        path.write_bytes(b"no database at all" * 300)
    again = made(tmp_path)
    assert again.append(1, 7, b"after\n") == 13
    note = b"[atoll: 7 bytes of output are missing here]\n"
    assert pieces(again) == [(1, None, note), (1, 7, b"after\n")]
    assert (tmp_path / "logs.torn").read_bytes().startswith(b"no database")
