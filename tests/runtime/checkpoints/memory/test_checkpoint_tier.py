"""One rank's tier alone: its training thread and the thread that copies."""

from __future__ import annotations

import threading
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
from atoll.agent.runtime.step.agreement import MemoryProgress
from atoll.agent.runtime.step.durable import NothingBeside


def test_a_generation_that_begins_as_the_one_before_is_told_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The copying thread says that step 1 is written, and is held up before it rests. 2. Training goes on to step 2,
    whose generation begins meanwhile. 3. It is written, and training does not wait for a thread that sleeps."""
    said: list[str] = []
    place = SimpleNamespace(rank=0, world_size=1, local_rank=0, local_world_size=1, is_main=True)
    session: Any = SimpleNamespace(
        job="tiny", run=1, view=1, seed=7, place=place, group=None, device=torch.device("cpu"),
        memory=MemorySettings(folder=tmp_path, room_bytes=1 << 30, nodes=(), kept_by=()),
        notice=lambda level, text: said.append(text),
    )  # fmt: skip
    model = nn.Linear(400, 400)  # too large to be copied on the training thread
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer, {}, NothingBeside())
    tested = CheckpointTier(session, snapshot)
    tested.start(0, None, size_of_state(model, [optimizer], snapshot))

    def boundary(step: int) -> int | None:
        snapshot.take(Position(epoch=0, consumed=step, step=step))
        return tested.at_boundary(tested.progress())

    told, complete = threading.Event(), tested._writer._complete

    def held_up(writing: Any) -> None:
        complete(writing)
        if not told.is_set():
            assert tested.progress() == MemoryProgress(1, 1)
            assert boundary(2) == 1
            told.set()

    monkeypatch.setattr(tested._writer, "_complete", held_up)
    monkeypatch.setattr(shard_writer, "LONGEST_WAIT_S", 5.0)
    assert boundary(1) is None
    assert told.wait(10)
    tested.wait_for_reads()
    tested.close()
    assert said == []
    steps = {parse(content_of(path)).header.step for path in tmp_path.glob("*.mem")}
    assert steps == {1, 2}
