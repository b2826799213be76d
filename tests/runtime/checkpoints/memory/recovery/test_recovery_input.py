"""A peer that sends something else than it said it holds: refused on all ranks, and the generation before is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header
from atoll.agent.runtime.checkpoints.memory.recovery import held_generations
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import HeldGenerations
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Bytes, SlotFile, Tail

MODEL = Fingerprint({})
LAYOUT = (
    b'{"model": {"digest": "%s", "tensors": {}}, "tensors": [["x", "U8", [8]]], "tree": {"dict": []}}'
    % MODEL.digest.encode()
)


def write(path: Path, step: int, *, job: str = "tiny", run: int = 1) -> Path:
    header = Header(
        job=job, run=run, step=step, epoch=0, consumed=0, loader_step=step, world_size=1, seed=7, model=MODEL
    ).to_json()
    file = SlotFile(path)
    data = file.begin(LAYOUT, xxhash.xxh3_128_digest(LAYOUT), 8)
    data[:] = step
    fields = {name: value for name, value in header.items() if name != "model"}
    tail = Tail(shard=0, shards=1, begin=0, size=8, total=8, header=fields, moving={"dict": []})
    file.seal(tail.sealed(shard_file.hashes(data)))
    file.close()
    return path


class Group:
    """One rank, whose own words come back from the wire changed by `wire`."""

    rank, world_size = 0, 1

    def __init__(self, wire: Callable[[Bytes], Bytes]) -> None:
        self._wire = wire

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        return [mine]

    def gather_rows(self, row: Any) -> list[list[int]]:
        return [list(row)]

    def broadcast_array(self, content: Bytes, source: int, limit: int) -> Bytes:
        return self._wire(content)


def newest_step(folder: Path, wire: Callable[[Bytes], Bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Which of the generations in the folder is taken, and what is said of the others."""
    said: list[str] = []
    place = SimpleNamespace(rank=0, world_size=1, local_rank=0, local_world_size=1)
    session: Any = SimpleNamespace(
        job="tiny", run=5, place=place, group=Group(wire), notice=lambda level, text: said.append(text)
    )
    monkeypatch.setattr(held_generations, "assembled", lambda shards, *own: SimpleNamespace(header=shards[0].header))
    found = HeldGenerations(session, folder, MODEL).newest((0, 0))
    return found.checkpoint.header.step if found is not None else -1, said


def flipped(content: Bytes) -> Bytes:
    changed = content.copy()
    changed[-1] ^= 1
    return changed


@pytest.mark.parametrize(
    ("instead", "why"),
    [
        (flipped, "its tail is not what was written"),
        (lambda content: content[:-3], "torn"),
        (lambda content: np.empty(0, np.uint8), "torn"),
        ("another step", "of run 1, step 7,"),
        ("another run", "of run 2, step 9,"),
        ("this run", "it is of run 5; this is run 5"),
        ("another job", "it is of job 'other'"),
    ],
)
def test_a_peer_that_sends_something_else_than_it_named_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: Callable[[Bytes], Bytes] | str, why: str
) -> None:
    """1. Generations 8 and 9 are there. 2. What arrives as 9 is something else. 3. All go on from 8."""
    folder, aside = tmp_path / "held", tmp_path / "aside"
    folder.mkdir()
    aside.mkdir()
    write(folder / "shard-0000-of-0001-slot-0.mem", 8)
    ninth = shard_file.content_of(write(folder / "shard-0000-of-0001-slot-1.mem", 9)).tobytes()
    others = {
        "another step": write(aside / "a", 7),
        "another run": write(aside / "b", 9, run=2),
        "this run": write(aside / "c", 9, run=5),
        "another job": write(aside / "d", 9, job="other"),
    }

    def wire(content: Bytes) -> Bytes:
        if content.tobytes() != ninth:
            return content
        return shard_file.content_of(others[instead]) if isinstance(instead, str) else instead(content)

    step, said = newest_step(folder, wire, monkeypatch)
    assert step == 8
    assert any("passes over a checkpoint in memory: shard 0 of step 9, from rank 0" in text for text in said), said
    assert any(why in text for text in said), said


def test_what_comes_as_it_was_named_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, step in enumerate((8, 9)):
        write(tmp_path / f"shard-0000-of-0001-slot-{index}.mem", step)
    assert newest_step(tmp_path, lambda content: content, monkeypatch) == (9, [])
