"""What nodes say they have of a job's checkpoints, put together."""

from __future__ import annotations

from atoll.controller.services.inventory import put_together
from atoll.v1 import jobs_pb2
from atoll.v1.agents_pb2 import HeldCheckpoint, HeldShard, Inventory

MEMBERS = {2: ["a", "b"]}


def shard(number: int, step: int, run: int = 2, **fields: object) -> HeldShard:
    return HeldShard(run=run, step=step, shard=number, shards=2, bytes=1000, age_s=1.0, **fields)  # type: ignore[arg-type]


def summary(rows: list[jobs_pb2.StoredCheckpoint]) -> list[tuple[str, int, int, str, list[str]]]:
    return [(row.tier, row.step, row.shards_there, row.health, list(row.nodes)) for row in rows]


def test_own_shards_and_copies_are_told_apart_by_where_each_rank_trained() -> None:
    everything = Inventory(memory=[shard(0, 7), shard(1, 7)])
    assert summary(put_together({"a": everything, "b": everything}, MEMBERS)) == [
        ("own memory", 7, 2, "complete", ["a", "b"]),
        ("others' memory", 7, 2, "complete", ["a", "b"]),
    ]


def test_a_generation_that_lacks_shards_is_in_progress_if_newer_and_incomplete_if_older() -> None:
    a = Inventory(memory=[shard(0, 7), shard(0, 8), shard(0, 5, run=1)])
    b = Inventory(memory=[shard(1, 7), HeldShard(shard=1, shards=2, writing=True)])
    assert summary(put_together({"a": a, "b": b}, MEMBERS)) == [
        ("own memory", 8, 1, "in progress", ["a"]),
        ("own memory", 7, 2, "complete", ["a", "b"]),
        ("own memory", 5, 1, "incomplete", ["a"]),
    ]


def test_a_lost_machines_shard_is_complete_by_its_copy() -> None:
    assert summary(put_together({"a": Inventory(memory=[shard(0, 7), shard(1, 7)])}, MEMBERS)) == [
        ("own memory", 7, 1, "complete", ["a"]),
        ("others' memory", 7, 1, "complete", ["a"]),
    ]


def test_a_shared_disk_is_one_row_and_damage_is_its_own() -> None:
    here = HeldCheckpoint(run=2, step=10, bytes=5, age_s=3, path="/mnt/vit/step-10")
    torn = HeldCheckpoint(run=2, step=20, age_s=1, path="/mnt/vit/step-20", trouble="it is torn")
    away = HeldCheckpoint(run=2, step=10, bytes=5, age_s=-1, path="s3://vit/step-10")
    bad = HeldShard(shard=0, shards=2, trouble="its head does not match")
    rows = put_together(
        {"a": Inventory(disk=[torn, here], store=[away]), "b": Inventory(disk=[here], memory=[bad])}, MEMBERS
    )
    assert summary(rows) == [
        ("disk", 20, 0, "damaged", ["a"]),
        ("disk", 10, 1, "complete", ["a", "b"]),
        ("store", 10, 1, "complete", []),
        ("others' memory", 0, 0, "damaged", ["b"]),
    ]
    assert [row.trouble for row in rows] == ["it is torn", "", "", "its head does not match"]
