"""The shards that ranks say they hold, and what is made of them."""

from __future__ import annotations

import pytest

from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import complete, sources
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation, HeldShard, decode, encode
from atoll.errors import CheckpointError
from atoll.v1.worker_pb2 import ShardReply

OLD, NEW = Generation(1, 8, 2, "a"), Generation(1, 9, 2, "a")
NEXT_RUN = Generation(2, 3, 3, "b")


def test_what_is_said_is_heard() -> None:
    held = [HeldShard(OLD, 0, 1), HeldShard(NEW, 1, 0)]
    assert decode(encode(held)) == held


def test_the_newest_generation_counts_of_which_all_is_there() -> None:
    said = [
        [HeldShard(OLD, 0, 0), HeldShard(NEW, 0, 1)],
        [HeldShard(OLD, 1, 0)],
        [HeldShard(OLD, 0, 0), HeldShard(NEXT_RUN, 0, 0), HeldShard(NEXT_RUN, 2, 0)],
    ]
    found = sources(said)
    assert complete(found) == [OLD]
    assert found[OLD] == {0: 0, 1: 1}
    said[2].append(HeldShard(NEW, 1, 1))
    assert complete(sources(said)) == [NEW, OLD]
    said[0].append(HeldShard(NEXT_RUN, 1, 0))
    assert complete(sources(said)) == [NEXT_RUN, NEW, OLD]


def test_equal_steps_of_two_shapes_are_two_generations() -> None:
    other = Generation(1, 9, 2, "b")
    assert complete(sources([[HeldShard(NEW, 0, 0)], [HeldShard(other, 1, 0)]])) == []


HELD = {"run": 1, "step": 9, "shard": 0, "shards": 2, "slot": 0, "layout": "a"}


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04K\x01.",
        b"{}",
        b"[" * 100_000,
        *(
            ShardReply(held=[ShardReply.Held(**{**HELD, **wrong})]).SerializeToString()
            for wrong in (
                {"shard": 2},
                {"shards": 0},
                {"slot": 4},
                {"run": 2**63},
                {"step": 2**64 - 1},
                {"bytes": 2**63},
            )
        ),
        ShardReply(held=[ShardReply.Held(**HELD)] * 5000).SerializeToString(),
    ],
)
def test_nonsense_of_another_rank_or_an_agent_is_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(raw)
