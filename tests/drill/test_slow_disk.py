"""The drill's slow disk: only checkpoints, and only from the epoch on that was named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drill.slow_disk import SlowDisk, slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    write = os.write
    yield SlowDisk(tmp_path)
    os.write = write


def write_s(path: Path) -> float:
    """How long a piece took that was written there."""
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    began = time.monotonic()
    try:
        os.write(file, b"piece")
    finally:
        os.close(file)
    assert path.read_bytes() == b"piece"
    return time.monotonic() - began


@pytest.mark.timeout(30)
def test_only_the_last_epochs_checkpoint_meets_the_slow_disk(tmp_path: Path, disk: SlowDisk) -> None:
    """1. A drill's strikes are over, hundreds of epochs before its end. 2. Each of their checkpoints met the slow disk
    at 14 s apiece: the rest, which takes seconds, took half an hour. 3. Only the last epoch's is to meet it."""
    piece = tmp_path / ".writing-000100-77-1" / "model.safetensors"
    disk.epoch = 7
    slow(tmp_path, 3600, from_epoch=9)
    write_s(piece)  # an hour, if it met it
    disk.epoch = 9
    pace = slow(tmp_path, 0.2, from_epoch=9)
    assert write_s(piece) >= 0.2
    slow(tmp_path, 3600)
    write_s(tmp_path / "log" / "else.txt")
    pace.unlink()
    write_s(piece)
