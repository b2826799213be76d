"""Residuals on disk between two runs, also those that an earlier release wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header
from atoll.strategies.shared_masters import residuals

NO_FLUSHES: Any = SimpleNamespace(counts={}, given={})


@pytest.fixture
def told() -> list[str]:
    return []


def write(directory: Path, step: int, value: float, rank: int = 0) -> None:
    header = Header(
        job="tiny", run=1, step=step, epoch=0, consumed=0, loader_step=step, world_size=2, seed=7, model=Fingerprint({})
    )
    packed = residuals.pack({"layer": torch.full((3,), value)}, [], None, NO_FLUSHES, copy=True)
    residuals.write(directory, header, rank, packed)


def taken_over(directory: Path, step: int, told: list[str]) -> dict[int, float]:
    """First value of what one rank alone takes over of two, by rank, as the next run goes on from `step`."""
    session: Any = SimpleNamespace(
        place=SimpleNamespace(rank=0, is_main=True),
        group=None,
        checkpoint=SimpleNamespace(directory=directory),
        notice=lambda level, text: told.append(text),
    )
    origin: Any = SimpleNamespace(run=1, step=step, world_size=2, shared={})
    found = residuals.take_over(session, origin, {"layer": 3})
    return {one.rank: float(one.residual["layer"][0]) for one in found}


def test_those_of_the_first_release_are_taken_over(tmp_path: Path, told: list[str]) -> None:
    """1. Both ranks wrote step 10 in `held-back`. 2. Rank 0 wrote step 11 with this release. 3. The next run takes of
    each rank what is nearest to its checkpoint."""
    write(tmp_path, 10, 1.0, rank=0)
    write(tmp_path, 10, 2.0, rank=1)
    (tmp_path / residuals.FOLDER).rename(tmp_path / "held-back")
    assert taken_over(tmp_path, 10, told) == {0: 1.0, 1: 2.0}
    write(tmp_path, 11, 3.0, rank=0)
    assert taken_over(tmp_path, 11, told) == {0: 3.0, 1: 2.0}
    assert taken_over(tmp_path, 10, told) == {0: 1.0, 1: 2.0}
    assert told == []


def test_those_of_the_first_release_go_once_as_many_are_written(tmp_path: Path) -> None:
    write(tmp_path, 10, 1.0)
    (tmp_path / residuals.FOLDER).rename(tmp_path / "held-back")
    former = tmp_path / "held-back" / "rank-0"
    write(tmp_path, 11, 2.0)
    assert former.is_dir()
    write(tmp_path, 12, 3.0)
    assert not former.exists()


def test_one_that_is_not_there_is_told_of(tmp_path: Path, told: list[str]) -> None:
    write(tmp_path, 10, 1.0, rank=1)
    assert taken_over(tmp_path, 10, told) == {1: 1.0}
    assert ["rank 0" in text for text in told] == [True]
