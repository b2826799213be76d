"""Checkpoints go to disk when they are due; and what happens where that takes too long."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.checkpoints import saver as saving
from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.checkpoints.saver import Saver
from atoll.agent.runtime.checkpoints.snapshot import Snapshot
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.step.durable import NothingBeside


def test_a_checkpoint_is_left_out_aloud_while_the_one_before_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The disk hangs at step 4's. 2. Step 8's is left out with a warning, and training goes on. 3. The disk is back:
    step 4's is whole, with the weights of step 4, and step 12's is written."""
    said: list[str] = []
    session: Any = SimpleNamespace(
        job="tiny", run=1, seed=7, link=None, device=torch.device("cpu"),
        place=SimpleNamespace(rank=0, world_size=1, is_main=True), notice=lambda level, text: said.append(text),
        checkpoint=SimpleNamespace(directory=tmp_path, every_steps=4, keep=3, keep_every_steps=0, store=""),
    )  # fmt: skip
    model = nn.Linear(3, 2)
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, NothingBeside())
    saver = Saver(session, snapshot)
    saver.begin(writes=True, step=0, on_disk=None)
    answers, write = threading.Event(), files.write

    def hangs(*args: Any) -> Path:
        assert answers.wait(20)
        return write(*args)

    monkeypatch.setattr(saving.files, "write", hangs)
    monkeypatch.setattr(saving, "LONGEST_WAIT_S", 0.05)
    for step in (4, 8, 12):
        with torch.no_grad():
            model.weight.fill_(step)
        if step == 12:
            answers.set()
            saver.close()
        snapshot.take(Position(epoch=0, consumed=step, step=step))
        saver.at_boundary(step)
    saver.close()
    assert said == ["checkpoint at step 8 left out: the one before is still being written; save less often"]
    found = {one.step: files.read(one.path).tensors["model/weight"] for one in listing.newest(tmp_path)}
    assert {step: set(weight.flatten().tolist()) for step, weight in found.items()} == {4: {4.0}, 12: {12.0}}
