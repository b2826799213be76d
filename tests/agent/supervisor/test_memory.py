"""The agent's folders in memory: whose they are, what is left of a killed agent, how much fits."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from atoll.agent.supervisor import memory
from atoll.agent.supervisor.memory import MemoryFolders, root_of
from atoll.errors import BadInput
from atoll.v1.worker_pb2 import Welcome


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def test_a_jobs_folder_is_the_users_alone_and_goes_when_the_job_is_over(shm: Path, state: Path) -> None:
    folders = MemoryFolders(state, shm)
    folder = folders.of("tiny-1a")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    (folder / "a").write_bytes(b"x")
    assert folders.jobs == ["tiny-1a"]
    folders.drop("tiny-1a")
    folders.drop("never-there")
    folders.drop("../state")
    assert (folders.jobs, state.is_dir()) == ([], True)


def test_what_a_killed_agent_left_is_found_by_the_next_and_an_end_on_purpose_leaves_nothing(
    shm: Path, state: Path
) -> None:
    (MemoryFolders(state, shm).of("tiny-1a") / "a").write_bytes(b"x")
    again = MemoryFolders(state, shm)
    assert again.jobs == ["tiny-1a"]
    again.close()
    assert list(shm.iterdir()) == []


def test_agents_of_two_state_directories_do_not_meet(shm: Path, tmp_path: Path) -> None:
    assert root_of(tmp_path / "a", shm) != root_of(tmp_path / "b", shm)


def test_a_folder_of_somebody_else_is_not_used(shm: Path, state: Path, tmp_path: Path) -> None:
    root = root_of(state, shm)
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(BadInput, match="not this user's alone"):
        MemoryFolders(state, shm)
    root.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "theirs")
    with pytest.raises(BadInput, match="not this user's alone"):
        MemoryFolders(state, shm)


def test_a_small_shared_memory_is_left_alone(shm: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 2**62)
    folders = MemoryFolders(state, shm)
    assert folders.root == state / "memory"
    assert f"{shm} has" in folders.warning, "a job's events say so"
    assert f"they are files in {state / 'memory'} instead" in folders.warning
    folders.close()


def test_room_is_shared_by_the_jobs_workers_and_counts_what_it_has_already(shm: Path, state: Path) -> None:
    folders = MemoryFolders(state, shm)
    file = os.open(folders.of("tiny-1a") / "a", os.O_RDWR | os.O_CREAT)
    alone = folders.room_bytes("tiny-1a", 1)
    assert 0 < alone <= os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize + 1
    assert folders.room_bytes("tiny-1a", 4) <= alone / 2
    os.close(file)


def test_what_has_no_room_in_memory_has_a_folder_on_disk_that_goes_the_same_ways(shm: Path, state: Path) -> None:
    """1. A worker is told of both places. 2. Its shard lies on disk. 3. The agent is killed: the next one finds the job
    by it. 4. The job is over, or the agent ends on purpose: nothing of it is left."""
    folders, welcome = MemoryFolders(state, shm), Welcome()
    assert folders.offer(welcome, "tiny-1a", 2) == ""
    assert welcome.memory_directory == str(folders.root / "tiny-1a")
    assert welcome.memory_bytes > 0
    spill = Path(welcome.spill_directory)
    assert spill.is_relative_to(state)
    assert 0 < welcome.spill_bytes <= os.statvfs(state).f_bavail * os.statvfs(state).f_frsize / 2
    for ends in ("job", "agent"):
        shutil.rmtree(folders.root)
        folders.root.mkdir(mode=0o700)
        spill.mkdir(parents=True)
        (spill / "a").write_bytes(b"x")
        again = MemoryFolders(state, shm)
        assert again.jobs == ["tiny-1a"]
        again.drop("tiny-1a") if ends == "job" else again.close()
        assert not spill.exists()


def test_an_agent_that_can_make_no_folder_in_memory_offers_the_disk_alone(shm: Path, state: Path) -> None:
    folders, welcome = MemoryFolders(state, shm), Welcome()
    folders.root.rmdir()
    folders.root.write_bytes(b"")
    assert "no checkpoints in memory on this machine" in folders.offer(welcome, "tiny-1a", 1)
    assert (welcome.memory_directory, welcome.spill_directory) == ("", str(state / "memory" / "tiny-1a"))
