"""One rank's tier alone: its training thread and the thread that copies."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from late_stream import LateStream, count_as_a_devices
from torch import nn

from atoll.agent.runtime.channel.agreement import MemoryProgress
from atoll.agent.runtime.checkpoints.disk import header as headers
from atoll.agent.runtime.checkpoints.memory import checkpoint_tier
from atoll.agent.runtime.checkpoints.memory.checkpoint_tier import CheckpointTier
from atoll.agent.runtime.checkpoints.memory.cost import cadence
from atoll.agent.runtime.checkpoints.memory.cost.state_size import size_of_state
from atoll.agent.runtime.checkpoints.memory.shards import shard_writer
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import content_of, parse
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import NothingBeside
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.session.session import MemorySettings
from atoll.agent.runtime.staging import StagingRing
from atoll.strategies.dense.settings import Dense


class Rig:
    """A rank alone, whose model is too large to be copied on the training thread."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.folder = folder
        place = SimpleNamespace(rank=0, world_size=1, local_rank=0, local_world_size=1, is_main=True)
        self.session: Any = SimpleNamespace(
            job="tiny", run=1, view=1, seed=7, place=place, group=None, device=torch.device("cpu"), strategy=Dense(),
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
    """1. The copying thread says that step 1 is written, is held up before it rests. 2. Training continues to step 2,
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


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """Tensors count as a device's, whose stream this is."""
    stream = LateStream()
    monkeypatch.setattr(checkpoint_tier, "staging_ring", lambda _device: StagingRing(stream))
    count_as_a_devices(monkeypatch)
    return stream


def held_up(tier: CheckpointTier, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The copying thread reads when it is set."""
    may_read, read = threading.Event(), tier._shard.read

    def late() -> None:
        assert may_read.wait(30)
        read()

    monkeypatch.setattr(tier._shard, "read", late)
    return may_read


@pytest.mark.parametrize("room", [1 << 40, 0])
def test_training_goes_on_beside_a_clone_and_waits_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """1. A generation of step 1 begins. 2. With room on the device updates go on while nothing was read yet; without,
    the first one waits. 3. What is in memory is the state of the step that it says."""
    on_a_device(monkeypatch).room = room
    rig = Rig(tmp_path)
    tested, model = rig.tier(0), rig.snapshot._model
    may_read = held_up(tested, monkeypatch)

    def train() -> None:
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight.fill_(step)
                model.bias.fill_(step)
            rig.boundary(tested, step)
            tested.wait_for_reads()

    training = threading.Thread(target=train)
    training.start()
    training.join(0.2 if room == 0 else 30)
    assert training.is_alive() == (room == 0)
    may_read.set()
    training.join(30)
    rig.wait_written(tested, 1)
    tested.close()
    found = {one.header.step: one for one in (parse(content_of(path)) for path in tmp_path.glob("*.mem"))}
    assert found
    assert room == 0 or found.keys() == {1}
    assert all(np.unique(np.frombuffer(one.data, np.float32)).tolist() == [step] for step, one in found.items())
    assert rig.said == []


def test_a_generation_that_was_given_up_is_read_to_its_end_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Another rank read a write of its script: all give the generation up, and this rank still reads clones. 2. The
    next one begins when they are read, and is whole."""
    on_a_device(monkeypatch)
    rig = Rig(tmp_path)
    tested, model = rig.tier(0), rig.snapshot._model
    may_read = held_up(tested, monkeypatch)
    rig.boundary(tested, 1)
    rig.snapshot.take(Position(epoch=0, consumed=2, step=2))
    tested.at_boundary(MemoryProgress(0, cadence.ABANDON))
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.bias.fill_(3.0)
    training = threading.Thread(target=rig.boundary, args=(tested, 3))
    training.start()
    training.join(0.2)
    assert training.is_alive()
    may_read.set()
    training.join(30)
    rig.wait_written(tested, 3)
    tested.close()
    shards = {one.header.step: one for one in (parse(content_of(path)) for path in tmp_path.glob("*.mem"))}
    assert np.unique(np.frombuffer(shards[3].data, np.float32)).tolist() == [3.0]


def test_a_generation_that_read_a_write_of_the_script_is_given_up_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Step 1 is whole in memory. 2. The script clamps a weight after step 2, by `.data`, before it is read. 3. That
    generation is given up aloud, and step 1 stays. 4. From then on a copy is read: step 3 is whole, though the script
    writes again."""
    monkeypatch.setattr(cadence.Cadence, "every", property(lambda _: 1, lambda _, every: None), raising=False)
    rig = Rig(tmp_path)
    tested, model, may_read = rig.tier(0), rig.snapshot._model, threading.Event()
    read = tested._shard.read

    def late() -> None:
        assert may_read.wait(30)
        read()

    monkeypatch.setattr(tested._shard, "read", late)
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(step)
        may_read.clear()
        rig.boundary(tested, step)
        if step > 1:
            model.weight.data.fill_(-1.0)  # type: ignore[operator]
        may_read.set()
        tested.wait_for_reads()
        rig.snapshot.note_writes()
        if step == 2:
            assert rig.boundary(tested, 2) is None  # all know of it
        else:
            rig.wait_written(tested, step)
    tested.close()
    assert rig.said == [
        "checkpoint in memory of step 2 is dropped: weight was written outside of optimizer.step() while it was read, "
        "so what was read is of two steps. From the next step on a copy of it is kept"
    ]
    found = {shard.header.step: shard for path in tmp_path.glob("*.mem") if (shard := parse(content_of(path)))}
    weights = {step: shard.data[: 4 * 400 * 400].view(np.float32) for step, shard in found.items()}
    assert {step: set(weight.tolist()) for step, weight in weights.items()} == {1: {1.0}, 3: {3.0}}


def test_a_shard_that_no_rank_would_take_at_a_recovery_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of more than 64 GiB was written, and refused when it was needed. One limit holds for both."""
    rig = Rig(tmp_path)
    monkeypatch.setattr(headers, "MAX_STATE_BYTES", 600_000)
    tested = rig.tier(0)
    rig.boundary(tested, 1)
    tested.wait_for_reads()
    tested.progress()
    tested.close()
    assert rig.said == [
        "no checkpoints in memory: this rank's shard takes 641600 bytes; at most 600000 are written and sent. Train in "
        "stages, or on more machines. Those on disk are written as requested; training continues"
    ]
    assert not any(path.stat().st_size for path in tmp_path.glob("*.mem"))
