"""The checkpoints that stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.checkpoints.disk import fence, files, listing
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.disk.listing import retained
from atoll.errors import CheckpointError

MOMENTS = st.sets(st.builds(Moment, st.integers(0, 4), st.integers(0, 60)), max_size=20)


def steps(directory: Path) -> list[int]:
    return sorted(moment.step for path in directory.iterdir() if (moment := Moment.of(path.name)))


def test_the_newest_stay_and_the_first_at_or_after_each_multiple() -> None:
    present = [Moment(1, step) for step in (40, 80, 120, 160, 204, 240)]
    assert retained(present, 2) == {Moment(1, 204), Moment(1, 240)}
    assert retained(present, 1, 100) == {Moment(1, 120), Moment(1, 204), Moment(1, 240)}


def test_of_equal_steps_that_of_the_newest_run_stays() -> None:
    present = [Moment(1, 100), Moment(1, 150), Moment(2, 100), Moment(2, 150), Moment(2, 160)]
    assert retained(present, 1, 100) == {Moment(2, 100), Moment(2, 160)}


@given(MOMENTS, st.integers(1, 5), st.integers(0, 30))
def test_what_stays_once_stays_whatever_is_removed_beside_it(present: set[Moment], keep: int, every: int) -> None:
    stay = retained(present, keep, every)
    assert stay <= present
    assert len(stay) >= min(keep, len(present))
    assert retained(stay, keep, every) == stay
    assert not present or max(present) in stay


def test_damaged_newest_ones_cost_neither_the_newest_sound_one_nor_those_kept_for_good(
    tmp_path: Path, header: Any
) -> None:
    for step in (100, 150, 180, 190, 195):
        files.write(tmp_path, header(step), {}, None)
    for step in (190, 195):
        os.truncate(tmp_path / Moment(3, step).name / "state.safetensors", 4)
    listing.keep_newest(tmp_path, 2, 100)
    assert steps(tmp_path) == [100, 180, 190, 195]
    listing.keep_newest(tmp_path, 1, 0, frozenset([Moment(3, 100)]))
    assert steps(tmp_path) == [100, 180, 195], "what a run goes on from stays too"
    with pytest.raises(CheckpointError, match="keep = 0"):
        listing.keep_newest(tmp_path, 0)


def test_nobody_waits_for_a_checkpoint_that_is_read(
    tmp_path: Path, header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Which one is sound is found out by reading it, which takes minutes for a large one. 2. The directory was
    locked meanwhile: whoever wanted to publish gave up after 30 s. 3. Now it is read before."""
    for step in (100, 150, 200):
        files.write(tmp_path, header(step), {}, None)
    is_sound = listing.is_sound

    def slowly(path: Path) -> bool:
        with fence.locked(tmp_path, deadline_s=0.05):  # what a writer does meanwhile
            return is_sound(path)

    monkeypatch.setattr(listing, "is_sound", slowly)
    listing.keep_newest(tmp_path, 1)
    assert steps(tmp_path) == [200]


def test_who_has_just_written_one_reads_none(tmp_path: Path, header: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A job keeps two. 2. Each further one was read as a whole as soon as it was written, to remove another. 3. Its
    writer knows what it wrote."""
    for step in (100, 150, 200):
        files.write(tmp_path, header(step), {}, None)
    monkeypatch.setattr(listing, "parts", lambda file: pytest.fail(f"{file} is read"))
    listing.keep_newest(tmp_path, 2, sound=Moment(3, 200))
    assert steps(tmp_path) == [150, 200]
