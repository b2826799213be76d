"""One rank's tier alone: its training thread and the thread that copies."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.api.session import MemorySettings
from atoll.agent.runtime.checkpoints.memory.checkpoint_tier import CheckpointTier
from atoll.agent.runtime.checkpoints.memory.cost.budget import size_of_state
from atoll.agent.runtime.checkpoints.memory.shards import shard_writer
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import content_of, parse
from atoll.agent.runtime.checkpoints.snapshot import Snapshot
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.step.plans.agreement import MemoryProgress
from atoll.agent.runtime.step.state.durable import NothingBeside


class Rig:
    """A rank alone, whose model is too large to be copied on the training thread."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.folder = folder
        place = SimpleNamespace(rank=0, world_size=1, local_rank=0, local_world_size=1, is_main=True)
        self.session: Any = SimpleNamespace(
            job="tiny", run=1, view=1, seed=7, place=place, group=None, device=torch.device("cpu"),
            memory=MemorySettings(folder=folder, room_bytes=1 << 30, nodes=(), kept_by=()),
            notice=lambda level, text: self.said.append(text),
        )  # fmt: skip
        model = nn.Linear(400, 400)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.snapshot = Snapshot(model, optimizer, {}, NothingBeside())
        self.bytes = size_of_state(model, [optimizer], self.snapshot)

    def tier(self, step: int, complete_step: int = 0) -> CheckpointTier:
        begun = CheckpointTier(self.session, self.snapshot, lambda: None)
        begun.start(step, None, self.bytes, complete_step=complete_step)
        return begun

    def boundary(self, tier: CheckpointTier, step: int) -> int | None:
        self.snapshot.take(Position(epoch=0, consumed=step, step=step))
        return tier.at_boundary(tier.progress())

    def wait_written(self, tier: CheckpointTier, step: int) -> None:
        ends_s = time.monotonic() + 60
        while tier.progress().step < step:
            assert time.monotonic() < ends_s
            time.sleep(0.002)

    def steps(self) -> set[int]:
        return {parse(content_of(path)).header.step for path in self.folder.glob("*.mem")}


def test_the_next_view_overwrites_the_newest_generation_last(tmp_path: Path) -> None:
    """1. Step 1 is complete, in the slot that a tier begins with; step 2, in the other one, is not known to be complete
    on all ranks. 2. A view of the same shape begins. 3. Its first generation goes over step 2, so that until it is
    complete there is step 1 to go on from. Before, it went over step 1."""
    rig = Rig(tmp_path)
    first = rig.tier(0)
    for step in (1, 2):
        rig.boundary(first, step)
        rig.wait_written(first, step)
    first.close()
    second = rig.tier(2, first.complete_step)
    rig.boundary(second, 5)
    rig.wait_written(second, 5)
    second.close()
    assert (first.complete_step, rig.steps()) == (1, {1, 5})


def test_a_generation_that_begins_as_the_one_before_is_told_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The copying thread says that step 1 is written, and is held up before it rests. 2. Training goes on to step 2,
    whose generation begins meanwhile. 3. It is written, and training does not wait for a thread that sleeps."""
    rig = Rig(tmp_path)
    tested = rig.tier(0)

    def boundary(step: int) -> int | None:
        return rig.boundary(tested, step)

    told, complete = threading.Event(), tested._writer._complete

    def held_up(writing: Any) -> None:
        complete(writing)
        if not told.is_set():
            assert tested.progress() == MemoryProgress(1, 1)
            assert boundary(2) == 1
            told.set()

    monkeypatch.setattr(tested._writer, "_complete", held_up)
    monkeypatch.setattr(shard_writer, "LONGEST_WAIT_S", 30.0)
    assert boundary(1) is None
    assert told.wait(30)
    tested.wait_for_reads()
    tested.close()
    assert rig.said == []
    assert rig.steps() == {1, 2}
