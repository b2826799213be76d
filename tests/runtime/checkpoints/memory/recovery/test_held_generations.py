"""The shards that ranks say they hold, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.agent.runtime.checkpoints.disk.shard_folders import file_name
from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import complete, decode, encode, sources
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation, WholeShard
from atoll.errors import CheckpointError

OLD, NEW = Generation(1, 8, 2, "a"), Generation(1, 9, 2, "a")
NEXT_RUN = Generation(2, 3, 3, "b")


def test_what_is_said_is_heard() -> None:
    held = [WholeShard(OLD, 0, Path(file_name(0, 2, 1))), WholeShard(NEW, 1, Path(file_name(1, 2, 0)))]
    assert decode(encode(held)) == [(OLD, 0, 1), (NEW, 1, 0)]


def test_the_newest_generation_counts_of_which_all_is_there() -> None:
    said = [[(OLD, 0, 0), (NEW, 0, 1)], [(OLD, 1, 0)], [(OLD, 0, 0), (NEXT_RUN, 0, 0), (NEXT_RUN, 2, 0)]]
    found = sources(said)
    assert complete(found) == [OLD]
    assert found[OLD] == {0: 0, 1: 1}
    said[2].append((NEW, 1, 1))
    assert complete(sources(said)) == [NEW, OLD]
    said[0].append((NEXT_RUN, 1, 0))
    assert complete(sources(said)) == [NEXT_RUN, NEW, OLD]


def test_equal_steps_of_two_shapes_are_two_generations() -> None:
    other = Generation(1, 9, 2, "b")
    assert complete(sources([[(NEW, 0, 0)], [(other, 1, 0)]])) == []


@pytest.mark.parametrize(
    "rows",
    [
        b"\x80\x04K\x01.",
        b"{}",
        b"[[1, 2]]",
        json.dumps([[1, 9, 2, "a", 2, 0]]).encode(),
        json.dumps([[1, 9, 2, "a", -1, 0]]).encode(),
        json.dumps([[1, 9.5, 2, "a", 0, 0]]).encode(),
        json.dumps([[1, True, 2, "a", 0, 0]]).encode(),
        json.dumps([[1, 9, 2, ["a"], 0, 0]]).encode(),
        json.dumps([[1, 9, 2, "a", 0, 0]] * 5000).encode(),
        json.dumps([[1, 9, 2, "a", 0, 4]]).encode(),
        b"[" * 100_000,
        b" " * (2 << 20),
    ],
)
def test_nonsense_of_another_rank_is_refused(rows: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(rows)
