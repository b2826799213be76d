"""Output on its way: gate, spool, stream, and the thread that reads it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.agent.supervisor.processes.exits import last_words
from atoll.agent.supervisor.worker_logs.logs import BATCH_BYTES, RESEND_S, LogStream
from atoll.agent.supervisor.worker_logs.output import (
    BURST_BYTES,
    RATE_BYTES_PER_S,
    TAIL_BYTES,
    Captured,
    OutputLimiter,
    OutputPump,
)
from atoll.agent.supervisor.worker_logs.spool import Spool, prune
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_REASON

KEY = WorkerKey("job-1", 1, 0)


def told(kept: bytes) -> int:
    """How many bytes the lines in `kept` say are missing."""
    return sum(int(n) for n in re.findall(rb"\xe2\x80\xa6 (\d+) bytes of output dropped \xe2\x80\xa6\n", kept))


def test_ordinary_output_passes_unchanged() -> None:
    gate = OutputLimiter(0.0)
    assert [gate.take(b"a\n", 0.1), gate.take(b"b\n", 0.2), gate.flush(0.3)] == [b"a\n", b"b\n", b""]


def test_flood_is_cut_its_end_kept_and_every_byte_accounted_for() -> None:
    gate, blocks, kept = OutputLimiter(0.0), BURST_BYTES // 4096 + 28, b""
    for _ in range(blocks):
        kept += gate.take(b"0123456789abcde\n" * 256, 0.0)
    last = b"Traceback\nValueError: x\n"
    kept += gate.take(last, 0.0) + gate.flush(0.0)
    assert kept.endswith(last)
    (line,) = re.findall(rb"\n\xe2\x80\xa6 \d+ bytes of output dropped \xe2\x80\xa6\n", kept)
    assert kept[BURST_BYTES:].startswith(line)
    assert len(kept) - len(line) + told(kept) == blocks * 4096 + len(last)


def test_little_more_than_the_burst_loses_nothing() -> None:
    gate = OutputLimiter(0.0)
    data = b"x" * (BURST_BYTES + TAIL_BYTES)
    assert gate.take(data, 0.0) + gate.flush(0.0) == data


def test_endless_flood_is_kept_at_the_rate_and_sampled() -> None:
    gate, kept, second = OutputLimiter(0.0), 0, 0
    for second in range(1, 61):
        for part in range(10):
            kept += len(gate.take(b"x" * 1_000_000, second + part / 10))
    assert kept <= BURST_BYTES + 61 * RATE_BYTES_PER_S
    assert kept >= 20 * TAIL_BYTES, "something of it is seen all the time"


def test_what_could_not_be_kept_is_told_with_the_next() -> None:
    gate = OutputLimiter(0.0)
    gate.lost(123)
    assert gate.take(b"on\n", 0.1) == "\n… 123 bytes of output dropped …\non\n".encode()
    assert gate.flush(0.2) == b""


def test_spool_keeps_two_files_and_says_what_is_gone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "log", file_bytes=100)
    for n in range(30):
        spool.append(b"%09d\n" % n)
    assert spool.end == 300
    assert spool.read(0, 1000) == (100, b"".join(b"%09d\n" % n for n in range(10, 20)))
    assert spool.read(195, 1000) == (0, b"0019\n")
    assert spool.read(200, 5) == (0, b"00000")
    assert spool.read(300, 5) == (0, b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1"]
    assert all(p.stat().st_size <= 100 for p in tmp_path.iterdir())
    spool.close()


def test_old_logs_are_deleted_but_none_in_use(tmp_path: Path) -> None:
    for n in range(6):
        path = tmp_path / f"job-{n}" / "run-1-rank-0.log"
        path.parent.mkdir()
        path.write_text("x")
        os.utime(path, (n, n))
    prune(tmp_path, keep=4, in_use=[tmp_path / "job-0" / "run-1-rank-0.log"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job-0", "job-4", "job-5"]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[LogStream]:
    spool = Spool(tmp_path / "log", file_bytes=2 * BATCH_BYTES)
    yield LogStream(KEY, spool)
    spool.close()


def test_next_piece_waits_for_the_acknowledgement(stream: LogStream) -> None:
    stream.spool.append(b"x" * (BATCH_BYTES + 5))
    first = stream.next_batch(0.0)
    assert first is not None
    assert (first.offset, len(first.data)) == (0, BATCH_BYTES)
    assert stream.next_batch(0.1) is None
    again = stream.next_batch(RESEND_S + 0.1)
    assert again == first, "no answer: once more"
    stream.ack(100)
    rest = stream.next_batch(6.0)
    assert rest is not None
    assert (rest.offset, len(rest.data)) == (100, BATCH_BYTES - 100), "it kept only a part"
    stream.ack(2**60)
    last = stream.next_batch(7.0)
    assert last is not None
    assert (last.offset, last.data) == (BATCH_BYTES, b"xxxxx"), "what was not sent cannot be acknowledged"
    stream.ack(0)
    assert not stream.is_fully_sent
    stream.ack(BATCH_BYTES + 5)
    assert stream.is_fully_sent
    assert stream.next_batch(99.0) is None


def test_new_connection_gets_what_was_not_acknowledged(stream: LogStream) -> None:
    stream.spool.append(b"one\n")
    first = stream.next_batch(0.0)
    stream.rewind()
    assert stream.next_batch(0.1) == first


def test_output_that_rotated_away_is_replaced_by_a_line(stream: LogStream) -> None:
    """The controller has part of it in flight when it goes away; what it sees has no gap and no overlap."""
    stream.spool.append(b"begin\n")
    first = stream.next_batch(0.0)
    assert first is not None
    for _ in range(6):
        stream.spool.append(b"y" * BATCH_BYTES)
    stream.spool.append(b"end\n")
    stream.rewind()
    assert stream.next_batch(1.0) == first
    seen = bytearray(first.data)
    stream.ack(len(seen))
    while batch := stream.next_batch(2.0):
        assert batch.offset == len(seen)
        assert len(batch.data) <= 256 * 1024
        seen += batch.data
        stream.ack(len(seen))
    assert seen.startswith(b"begin\n\n\xe2\x80\xa6 ")
    assert seen.endswith(b"yend\n")
    dropped_mb = re.findall(rb"(\d\.\d) MB of output dropped", bytes(seen))
    assert len(dropped_mb) == 1
    assert abs(float(dropped_mb[0]) * 1e6 + seen.count(b"y") - 6 * BATCH_BYTES) < 1e5


def test_pump_reads_to_the_end_and_can_be_cut(tmp_path: Path) -> None:
    pump = OutputPump()
    ends = [threading.Event(), threading.Event()]
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in ends]
    captured = []
    for number, ((read_fd, write_fd), end) in enumerate(zip(pipes, ends, strict=True)):
        os.set_blocking(read_fd, False)
        captured.append(Captured(read_fd, Spool(tmp_path / str(number)), lambda: None, end.set))
        pump.add(captured[-1])
        os.write(write_fd, b"\xff\x00garbage\n")
    os.close(pipes[0][1])
    assert ends[0].wait(30)
    assert captured[0].spool.read(0, 100) == (0, b"\xff\x00garbage\n")
    assert not ends[1].is_set()
    pump.cut(captured[1])
    assert ends[1].wait(30)
    pump.close()
    os.close(pipes[1][1])
    for each in captured:
        each.spool.close()


def test_full_disk_loses_output_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pump, ended = OutputPump(), threading.Event()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    spool = Spool(tmp_path / "log")
    full = threading.Event()

    def refuse(data: bytes) -> None:
        full.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "append", refuse)
        pump.add(Captured(read_fd, spool, lambda: None, ended.set))
        os.write(write_fd, b"lost")
        assert full.wait(30)
    os.write(write_fd, b"kept\n")
    os.close(write_fd)
    assert ended.wait(30)
    pump.close()
    kept = spool.read(0, 1000)[1]
    assert kept.endswith(b"dropped \xe2\x80\xa6\nkept\n")
    spool.close()


def test_last_words() -> None:
    trace = (
        b"epoch 1\nTraceback (most recent call last):\n  File 't.py', line 1\n    f()\nValueError: no\nsecond line\n"
    )
    assert last_words(trace) == "ValueError: no"
    assert last_words(trace + b"[W1121] destroy_process_group was not called\n") == "ValueError: no"
    assert last_words(trace + b"\nDuring it:\n\n" + trace.replace(b"Value", b"Key")) == "KeyError: no"
    ranked = b"".join(b"[rank1]: " + line + b"\n" for line in trace.splitlines())
    assert last_words(ranked + b"[W1121] destroy_process_group was not called\n") == "ValueError: no"
    assert (
        last_words(b"  File 't.py', line 1\n    x = = 1\nSyntaxError: invalid syntax\n\n")
        == "SyntaxError: invalid syntax"
    )
    assert last_words(b"\x1b[31mred\x1b[0m \x07\xff\n") == "red \ufffd"
    assert last_words(b"") == ""
    assert len(last_words(b"x" * 10_000)) == MAX_REASON
