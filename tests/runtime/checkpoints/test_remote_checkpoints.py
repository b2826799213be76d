"""The remote checkpoint that a run goes on from: its store's, or that of the job it was told to start from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header
from atoll.agent.runtime.checkpoints.remote_checkpoints import RemoteCheckpoints
from atoll.agent.runtime.session.session import CheckpointSettings, SourceCheckpoint
from atoll.errors import CheckpointError

NOTHING = (-1, -1)


def write(directory: Path, step: int, run: int = 2) -> Path:
    model = Fingerprint({"w": ("float32", (4,))})
    numbers = {"epoch": 0, "consumed": 0, "loader_step": step, "world_size": 2, "seed": 0}
    header = Header(job="old-1", run=run, step=step, model=model, **numbers)  # type: ignore[arg-type]
    return files.write(directory, header, {"w": torch.full((4,), float(step))}, None, as_run=9)


def session_of(run: int = 3, store: str = "", start: SourceCheckpoint | None = None) -> tuple[Any, list[str]]:
    """A run of one worker, and what it told."""
    told: list[str] = []
    settings = CheckpointSettings(directory=Path(), every_steps=0, keep=2, store=store, start_from=start)
    place = SimpleNamespace(is_main=True, rank=0)
    session = SimpleNamespace(
        checkpoint=settings, place=place, run=run, job="new-1", group=None, notice=lambda _, text: told.append(text)
    )
    return session, told


def steps(directory: Path) -> list[int]:
    return [found.step for found in listing.newest(directory, pytest.fail)]


def test_the_stores_newest_is_fetched_only_where_no_machine_has_one_as_new(tmp_path: Path) -> None:
    write(tmp_path / "store", 10)
    session, told = session_of(store=f"file://{tmp_path}/store")
    remote = RemoteCheckpoints(session, tmp_path / "own")
    assert remote.newest_in_store == Moment(2, 10)
    remote.bring(lambda: (2, 10))
    assert not (tmp_path / "own").exists()
    remote.bring(lambda: (1, 99))
    assert (steps(tmp_path / "own"), told) == ([10], [])


def test_a_first_run_asks_no_store() -> None:
    session, told = session_of(run=1, store="no-such://bucket")
    remote = RemoteCheckpoints(session, Path())
    remote.bring(lambda: NOTHING)
    assert (remote.newest_in_store, told) == (None, [])


def test_where_the_stores_newest_is_damaged_the_one_before_is_used(tmp_path: Path) -> None:
    write(tmp_path / "store", 10)
    os.truncate(write(tmp_path / "store", 20) / "state.safetensors", 50)
    session, told = session_of(store=f"file://{tmp_path}/store")
    RemoteCheckpoints(session, tmp_path / "own").bring(lambda: NOTHING)
    assert steps(tmp_path / "own") == [10]
    assert "state.safetensors of step-000000020-run-000002 is damaged: it has 50 bytes" in told[0]


def test_a_job_never_begins_anew_because_its_store_does_not_answer(tmp_path: Path) -> None:
    session, told = session_of(store="no-such://bucket")
    remote = RemoteCheckpoints(session, tmp_path)
    remote.bring(lambda: (1, 5))
    with pytest.raises(CheckpointError, match="no machine of this run has a checkpoint, and the object store"):
        remote.bring(lambda: NOTHING)
    assert "the object store is not used: no-such://bucket" in told[0]
    os.truncate(write(tmp_path / "store", 10) / "state.safetensors", 50)
    session, _ = session_of(store=f"file://{tmp_path}/store")
    with pytest.raises(CheckpointError, match="the object store, which may have one, gives none: state.safetensors"):
        RemoteCheckpoints(session, tmp_path / "own").bring(lambda: NOTHING)


@pytest.mark.parametrize("where", ["directory", "store"])
def test_a_job_starts_from_exactly_the_step_it_was_told_or_from_the_newest_sound_one(
    tmp_path: Path, where: str
) -> None:
    """1. Steps 10 and 20 are sound, 30 is torn. 2. What is read counts as the new job's own, of no run yet."""
    for step in (10, 20, 30):
        path = write(tmp_path / "old", step)
    os.truncate(path / "state.safetensors", 50)

    def start(step: int | None) -> tuple[Any, list[str]]:
        url = f"file://{tmp_path}/old" if where == "store" else ""
        directory = tmp_path / ("old" if where == "directory" else "nowhere")
        session, told = session_of(run=1, start=SourceCheckpoint(directory=directory, store=url, step=step))
        return RemoteCheckpoints(session, tmp_path / "own").start(), told

    found, told = start(10)
    assert (found.header.job, found.header.run, found.header.step, told) == ("new-1", 0, 10, [])
    assert found.tensors["w"].tolist() == [10.0] * 4
    found, told = start(None)
    assert found.header.step == 20
    assert "skips a checkpoint" in told[0]
    with pytest.raises(CheckpointError, match=r"step 7, which no machine of this run can read.*is step 10, 20, 30"):
        start(7)
    with pytest.raises(CheckpointError, match=r"step 30, which no machine.*state.safetensors is (torn|damaged)"):
        start(30)
    shutil.rmtree(tmp_path / "old")
    with pytest.raises(CheckpointError, match="is to start from a checkpoint, which no machine of this run can read"):
        start(None)
    assert not (tmp_path / "own").exists(), "nothing is written where it was read"
