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
from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.runtime.checkpoints.memory.recovery import held_generations
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import HeldGenerations
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Bytes, SlotFile, Tail
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import HeldShard, Resumable, encode, whole_shards

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
    """Two ranks on machines of their own, of which the other one holds everything; what it sends is changed by
    `wire`."""

    rank, world_size = 0, 2

    def __init__(self, folder: Path, wire: Callable[[Bytes], Bytes]) -> None:
        self._folders, self._wire = ShardFolders(folder), wire
        self._held = whole_shards(self._folders, Resumable("tiny", 4, MODEL), (0, 1), lambda why: None)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        return [mine, encode(self._held)]

    def gather_rows(self, row: Any) -> list[list[int]]:
        if type(row[0]) is bool:  # whether all went well
            return [list(row), list(row)]
        self._sends: HeldShard = self._held.pop()  # the newest
        return [[0], [len(self._sent())]]

    def distribute(self, content: Bytes | None, length: int, routes: Any) -> Bytes:
        assert (content, routes) == (None, [(1, 0)])
        assert len(self._sent()) == length
        return self._sent()

    def _sent(self) -> Bytes:
        path = self._folders.path(self._sends.shard, self._sends.generation.shards, self._sends.slot)
        assert path is not None
        return self._wire(shard_file.content_of(path))


def newest_step(folder: Path, wire: Callable[[Bytes], Bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Which of the generations in the folder is taken, and what is said of the others."""
    said: list[str] = []
    place = SimpleNamespace(rank=0, world_size=2, local_rank=0, local_world_size=1)
    memory = SimpleNamespace(nodes=("a", "b"))
    group = Group(folder, wire)
    session: Any = SimpleNamespace(
        job="tiny", run=5, place=place, group=group, memory=memory, notice=lambda level, text: said.append(text)
    )
    monkeypatch.setattr(held_generations, "assembled", lambda state, *own: SimpleNamespace(header=state.header))
    found = HeldGenerations(session, ShardFolders(None), MODEL, 4).newest((0, 0))
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
        (lambda content: np.empty(0, np.uint8), "no rank can read any more"),
        ("another step", "of run 1, step 7,"),
        ("another run", "of run 2, step 9,"),
        ("this run", "it is of run 5; run 4 is the newest that counts"),
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
    assert any("skips a checkpoint in memory: shard 0 of step 9, " in text for text in said), said
    assert any(why in text for text in said), said


def test_what_comes_as_it_was_named_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, step in enumerate((8, 9)):
        write(tmp_path / f"shard-0000-of-0001-slot-{index}.mem", step)
    assert newest_step(tmp_path, lambda content: content, monkeypatch) == (9, [])
