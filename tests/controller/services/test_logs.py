from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from atoll.controller.services.logs import LogStore, RankLog
from atoll.errors import BadInput


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
    log = RankLog(tmp_path, 0)
    assert log.append(1, 0, b"hello ") == 6
    assert log.append(1, 0, b"hello ") == 6
    assert log.append(1, 3, b"lo world") == 11
    assert log.append(1, 4, b"o") == 11
    assert pieces(log) == [(1, 0, b"hello world")]


def test_missing_bytes_are_noted(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    log.append(1, 0, b"begin\n")
    assert log.append(1, 106, b"end\n") == 110
    assert pieces(log) == [
        (1, 0, b"begin\n"),
        (1, None, b"[atoll: 100 bytes of output are missing here]\n"),
        (1, 106, b"end\n"),
    ]


def test_late_words_of_an_older_run_are_kept_apart(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    log.append(1, 0, b"one ")
    log.append(2, 0, b"two ")
    assert log.append(1, 4, b"late ") == 9
    assert log.append(2, 4, b"more ") == 9
    assert pieces(log) == [(1, 0, b"one "), (2, 0, b"two "), (1, 4, b"late "), (2, 4, b"more ")]


def test_a_restarted_controller_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = RankLog(tmp_path, 0)
    first.append(1, 0, b"one ")
    first.append(1, 9, b"two ")
    again = RankLog(tmp_path, 0)
    assert again.append(1, 9, b"two three") == 18
    assert text(again) == text(RankLog(tmp_path, 0))
    assert text(again).endswith(b"two three")


def test_two_files_are_kept_at_most(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, file_bytes=100)
    for i in range(200):
        log.append(1, 10 * i, b"line %04d\n" % i)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir() if path.name != "rank-0.index"}
    assert sizes == {"rank-0.log": 100, "rank-0.log.1": 100}
    assert text(log) == b"".join(b"line %04d\n" % i for i in range(180, 200))
    first = log.read(0)
    assert first is not None
    assert (first.run, first.offset) == (1, 1800)
    again = RankLog(tmp_path, 0, file_bytes=100)
    assert again.append(1, 0, b"x" * 2000) == 2000
    assert text(again) == text(log)


def test_a_controller_killed_amid_a_rotation_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RankLog(tmp_path, 0, file_bytes=10)
    log.append(1, 0, b"0123456789")

    def killed(end: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(log, "_moved", killed)
    with pytest.raises(KeyboardInterrupt):
        log.append(1, 10, b"abcde")
    again = RankLog(tmp_path, 0, file_bytes=10)
    assert again.append(1, 10, b"abcde") == 15
    assert text(again) == b"0123456789abcde"
    assert text(RankLog(tmp_path, 0)) == b"0123456789abcde"


def _full_disk(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_full_disk_no_run_gets_the_output_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Run 1 wrote its output, then the disk is full: the index cannot tell of run 2. 2. Space is freed, the agent
    repeats what run 2 said, and it is kept. 3. A controller that begins anew knows whose each byte is."""
    log = RankLog(tmp_path, 0)
    log.append(1, 0, b"one ")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", _full_disk)
        with pytest.raises(OSError, match="No space left"):
            log.append(2, 0, b"two ")
    assert log.append(2, 0, b"two ") == 4
    expected = [(1, 0, b"one "), (2, 0, b"two ")]
    assert [piece for piece in pieces(log) if piece[2]] == expected
    assert [piece for piece in pieces(RankLog(tmp_path, 0)) if piece[2]] == expected
    assert RankLog(tmp_path, 0).append(1, 4, b"late") == 8, "run 1 has written no more than it did"


def test_a_disk_that_fills_amid_a_rotation_loses_no_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A file is full and becomes the older one; then the disk is full, so the index still says that it is about to.
    2. Space is freed and output is kept. 3. A controller that begins anew reads the same bytes of the same runs."""
    log = RankLog(tmp_path, 0, file_bytes=10)
    log.append(1, 0, b"0123456789")
    write_text, saves = Path.write_text, []

    def second_fails(path: Path, data: str) -> int:
        saves.append(path)
        return write_text(path, data) if len(saves) == 1 else _full_disk()

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", second_fails)
        with pytest.raises(OSError, match="No space left"):
            log.append(1, 10, b"abcde")
    assert log.append(1, 10, b"abcde") == 15
    again = RankLog(tmp_path, 0, file_bytes=10)
    assert text(again) == text(log) == b"0123456789abcde"
    assert again.append(1, 0, b"0123456789abcdef") == 16


def test_output_that_was_written_by_half_is_not_kept_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The disk is full after the first bytes of a batch. 2. The agent repeats all of it. 3. It is there once."""
    log = RankLog(tmp_path, 0)
    log.append(1, 0, b"one ")
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode: _HalfWritten(path))
        with pytest.raises(OSError, match="No space left"):
            log.append(1, 4, b"two three ")
    assert log.append(1, 4, b"two three ") == 14
    assert text(log) == text(RankLog(tmp_path, 0)) == b"one two three "


class _HalfWritten(io.FileIO):
    """A file on a disk that takes three more bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a")

    def write(self, data: bytes) -> int:  # type: ignore[override]
        super().write(data[:3])
        return _full_disk()


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
    log = RankLog(tmp_path, 0)
    log.append(1, 0, written)
    assert text(log, log.tail(lines)) == expected


def test_the_last_lines_over_two_files(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, file_bytes=30)
    for i in range(5):
        log.append(1, 10 * i, b"line %04d\n" % i)
    assert text(log, log.tail(3)) == b"line 0002\nline 0003\nline 0004\n"


def test_nothing_is_read_from_an_empty_log(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    assert (log.read(0), log.tail(5), log.begin, log.end) == (None, 0, 0, 0)


def test_logs_of_jobs_lie_apart_and_are_removed_together(tmp_path: Path) -> None:
    logs = LogStore(tmp_path)
    logs.rank("one-1", 0).append(1, 0, b"x")
    logs.rank("one-1", 11).append(1, 0, b"x")
    logs.rank("two-2", 0).append(1, 0, b"y")
    assert (logs.ranks("one-1"), logs.ranks("two-2"), logs.ranks("none-0")) == ([0, 11], [0], [])
    logs.remove("one-1")
    assert logs.ranks("one-1") == []
    assert [path.name for path in tmp_path.iterdir()] == ["two-2"]


@pytest.mark.parametrize("job", ["../etc", "", "/", "a/b", "UP"])
def test_no_id_leads_out_of_the_folder(tmp_path: Path, job: str) -> None:
    with pytest.raises(BadInput, match="is no job's id"):
        LogStore(tmp_path).rank(job, 0)


def test_a_torn_index_keeps_the_text_and_takes_what_comes(tmp_path: Path) -> None:
    """A power cut may leave an empty index. Its agent repeats its output for ever, so it must be taken."""
    log = RankLog(tmp_path, 0)
    log.append(1, 0, b"before\n")
    (tmp_path / "rank-0.index").write_text("")
    again = RankLog(tmp_path, 0)
    assert again.append(1, 7, b"after\n") == 13
    note = b"[atoll: 7 bytes of output are missing here]\n"
    assert pieces(again) == [(0, None, b"before\n"), (1, None, note), (1, 7, b"after\n")]
    assert pieces(RankLog(tmp_path, 0)) == pieces(again)
