"""Writers that are killed, that race, and whose disk is full."""

from __future__ import annotations

import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.checkpoints.disk.fence import locked
from atoll.errors import CheckpointError


def forked(work: Callable[[], None]) -> int:
    """The pid of a child that does `work` and then ends without a word; torch is loaded in it already."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # OpenMP's threads did not come along
            work()
        finally:
            os._exit(1)
    return pid


def wait_for(pid: int, deadline_s: float) -> int:
    """The child's wait status. One that does not end in time is killed."""
    child = os.pidfd_open(pid)
    try:
        if not select.select([child], [], [], deadline_s)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]
    finally:
        os.close(child)


def sound_steps(directory: Path, header: Any) -> int:
    """Every checkpoint there is whole; the newest step, or 0."""
    newest = 0
    for found in listing.newest(directory, pytest.fail):
        read = files.read(found.path)
        assert set(read.tensors["model/w"].tolist()) == {float(read.header.step)}
        newest = max(newest, read.header.step)
    return newest


def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path, header: Any) -> None:
    """1. A child writes one step after another. 2. SIGKILL at some moment. 3. The newest loads; the next goes on."""
    moments = random.Random(7)
    step = hit = kills = 0
    while kills < 15 or (not (hit and step) and kills < 200):  # a busy machine gets less far before each
        kills += 1
        begun, begin = os.pipe()

        def write_on(step: int = step, begin: int = begin) -> None:
            os.write(begin, b".")
            for number in range(step + 1, step + 10_000):
                files.write(tmp_path, header(number), {"model/w": torch.full((50_000,), float(number))}, None)
                listing.keep_newest(tmp_path, 3)

        pid = forked(write_on)
        os.close(begin)
        os.read(begun, 1)
        os.close(begun)
        time.sleep(moments.uniform(0.0, 0.06))  # the random moment is what is tested
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(wait_for(pid, 30))
        hit += any(path.name.startswith(".writing") for path in tmp_path.iterdir())
        newest = sound_steps(tmp_path, header)
        assert newest >= step
        step = newest
    assert step > 0
    assert hit > 0  # some were killed in the middle
    files.write(tmp_path, header(step + 1), {"model/w": torch.full((1,), float(step + 1))}, None)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".writing", ".removing"))] == []


@pytest.mark.parametrize("same", [True, False])
def test_two_writers_at_once_both_succeed(tmp_path: Path, header: Any, same: bool) -> None:
    failed: list[BaseException] = []

    def write_all(writer: int) -> None:
        try:
            for step in range(10):
                number = step if same else 2 * step + writer
                files.write(tmp_path, header(number), {"model/w": torch.full((5000,), float(number))}, writer)
        except CheckpointError as error:
            failed.append(error)

    threads = [threading.Thread(target=write_all, args=(writer,)) for writer in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sound_steps(tmp_path, header) == (9 if same else 19)
    assert len(listing.newest(tmp_path, pytest.fail)) == (10 if same else 20)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".writing")] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    )
    if not done or done.returncode != 0:
        pytest.skip(f"no file system of its own can be mounted here: {done.stderr if done else 'no mount command'!r}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_an_error_and_the_older_checkpoint_stays(small_disk: Path, header: Any) -> None:
    kept = files.write(small_disk, header(1), {"model/w": torch.ones(50_000)}, None)
    with pytest.raises(CheckpointError, match=r"No space left on device. Free some space") as full:
        files.write(small_disk, header(2), {"model/w": torch.ones(250_000)}, None)
    assert "step-000000002-run-000003" in str(full.value)
    assert sorted(path.name for path in small_disk.iterdir()) == [".lock", "fence", kept.name]
    assert sound_steps(small_disk, header) == 1
    files.write(small_disk, header(2), {"model/w": torch.full((50_000,), 2.0)}, None)
    assert sound_steps(small_disk, header) == 2


def test_a_file_size_limit_is_an_error_and_the_older_checkpoint_stays(tmp_path: Path, header: Any) -> None:
    """What a quota does. In a child, because the limit is the process's."""
    files.write(tmp_path, header(1), {"model/w": torch.ones(50_000)}, None)
    said = tmp_path / "said"

    def write_too_much() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        try:
            files.write(tmp_path, header(2), {"model/w": torch.ones(250_000)}, None)
        except CheckpointError as error:
            said.write_text(str(error))

    assert os.WIFEXITED(wait_for(forked(write_too_much), 60))
    assert "File too large. Free some space or choose another checkpoint directory" in said.read_text()
    assert sound_steps(tmp_path, header) == 1


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, header: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file"):
        files.write(tmp_path / "file", header(), {}, None)


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path, header: Any) -> None:
    ready = tmp_path / "ready"
    program = (
        "import fcntl, os, pathlib, sys, time\n"
        f"lock = os.open({str(tmp_path / '.lock')!r}, os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as holder:
        deadline_s = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match="not free within"), locked(tmp_path, 0.05):
            pytest.fail("two held the lock")
        holder.kill()
    files.write(tmp_path, header(), {}, None)
