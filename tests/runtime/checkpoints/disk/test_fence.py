from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.checkpoints.disk.fence import locked, take
from atoll.errors import CheckpointError


def test_an_older_run_is_fenced_once_a_newer_one_has_taken_the_directory(tmp_path: Path, header: Any) -> None:
    """1. Run 3 writes. 2. Run 4 starts elsewhere and takes the directory. 3. Run 3, not yet dead, publishes nothing."""
    take(tmp_path, 3)
    files.write(tmp_path, header(100, run=3), {}, None)
    take(tmp_path, 4)
    with pytest.raises(CheckpointError, match="run 3 was fenced by run 4"):
        files.write(tmp_path, header(101, run=3), {}, None)
    with pytest.raises(CheckpointError, match="run 3 was fenced by run 4"):
        take(tmp_path, 3)
    take(tmp_path, 4)
    files.write(tmp_path, header(101, run=4), {}, None)
    assert [(one.run, one.step) for one in listing.newest(tmp_path)] == [(4, 101), (3, 100)]


def test_a_run_that_is_fenced_while_it_writes_publishes_nothing(
    tmp_path: Path, header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = files.write_sealed

    def fenced_meanwhile(*arguments: Any) -> None:
        seal(*arguments)
        take(tmp_path, 4)

    monkeypatch.setattr(files, "write_sealed", fenced_meanwhile)
    with pytest.raises(CheckpointError, match="run 3 was fenced by run 4"):
        files.write(tmp_path, header(100, run=3), {}, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "fence"]


def test_writing_takes_the_directory_too(tmp_path: Path, header: Any) -> None:
    files.write(tmp_path, header(run=5), {}, None)
    with pytest.raises(CheckpointError, match="run 4 was fenced by run 5"):
        take(tmp_path, 4)


def test_a_fence_that_makes_no_sense_stops_everybody(tmp_path: Path, header: Any) -> None:
    (tmp_path / "fence").write_text("run four")
    with pytest.raises(CheckpointError, match=r"fence holds b'run four', not a run number. Remove it"):
        files.write(tmp_path, header(), {}, None)


def test_the_lock_is_waited_for_with_a_deadline(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CheckpointError, match=r"not free within 0\.05 s"), locked(tmp_path, 0.05):
        pytest.fail("two held the lock")


def test_the_lock_passes_to_the_next_who_waits(tmp_path: Path) -> None:
    held, order = threading.Event(), []

    def first() -> None:
        with locked(tmp_path):
            held.set()
            order.append("first")
            waiting.wait(30)
            order.append("first again")

    waiting = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(30)
    threading.Timer(0.05, waiting.set).start()
    with locked(tmp_path, 30):
        order.append("second")
    thread.join()
    assert order == ["first", "first again", "second"]


def test_an_older_view_of_a_run_is_fenced_as_an_older_run_is(tmp_path: Path) -> None:
    """1. View 2 of run 4 takes the directory. 2. Who was left behind in view 1 is refused, by name; view 2 and run 5
    are not."""
    take(tmp_path, 4)
    take(tmp_path, 4, 2)
    with pytest.raises(CheckpointError, match="view 1 of run 4 was fenced by its view 2"):
        take(tmp_path, 4)
    with pytest.raises(CheckpointError, match="run 3 was fenced by run 4"):
        take(tmp_path, 3, 9)
    take(tmp_path, 4, 2)
    take(tmp_path, 5)
    assert (tmp_path / "fence").read_text() == "5 1\n"
