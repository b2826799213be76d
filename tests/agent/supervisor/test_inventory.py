"""A look at what lies on a node: heads and manifests, on request, in a thread."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest
import torch
from written_shards import JOB, header, write_shard

from atoll.agent.runtime.checkpoints.disk import files
from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.supervisor.inventory import InventoryTaker, checkpoints_in, checkpoints_under, shards_in
from atoll.v1.agents_pb2 import Inventory, TakeInventory


def test_shards_in_memory_are_told_by_their_heads(tmp_path: Path) -> None:
    """1. One whole, one being written, one whose head is damaged, and files of others."""
    whole = write_shard(tmp_path, 0, 0, 7)
    write_shard(tmp_path, 0, 1, 8, seal=False)
    damaged = write_shard(tmp_path, 1, 0, 7)
    with damaged.open("r+b") as file:
        file.seek(9)
        file.write(b"\xff")
    (tmp_path / "other").write_text("not a shard")
    held = shards_in(ShardFolders(tmp_path))
    assert [(one.run, one.step, one.shard, one.shards, one.writing) for one in held] == [
        (2, 7, 0, 2, False),
        (0, 0, 0, 2, True),
        (0, 0, 1, 2, False),
    ]
    assert held[0].bytes == whole.stat().st_size
    assert "its head does not match" in held[2].trouble
    assert shards_in(ShardFolders(tmp_path / "absent")) == []


@pytest.mark.parametrize("where", ["disk", "store"])
def test_checkpoints_in_files_are_told_by_their_manifests(tmp_path: Path, where: str) -> None:
    for step in (10, 20, 30, 40):
        files.write(tmp_path / JOB, header(step), {"w": torch.ones(4)}, None)
    at = {step: tmp_path / JOB / header(step).name for step in (20, 30, 40)}
    os.truncate(at[20] / "state.safetensors", 8)
    (at[30] / "manifest.json").write_text("{}")
    (at[40] / "manifest.json").unlink()
    url = f"file://{tmp_path}/{JOB}"
    held = checkpoints_in(tmp_path / JOB) if where == "disk" else checkpoints_under(url)
    assert [(one.run, one.step, bool(one.trouble)) for one in held] == [
        (2, 40, True), (2, 30, True), (2, 20, True), (2, 10, False),
    ]  # fmt: skip
    assert ["torn" in held[2].trouble, held[3].bytes > 0, held[3].age_s >= 0] == [True, True, True]
    assert held[3].path == (str(tmp_path / JOB / header(10).name) if where == "disk" else f"{url}/{header(10).name}")


def test_a_question_is_answered_from_memory_disk_and_store_and_a_look_that_fails_says_why(tmp_path: Path) -> None:
    files.write(tmp_path / "jobs" / JOB, header(10), {}, None)
    files.write(tmp_path / "store" / JOB, header(20), {}, None)
    (tmp_path / "memory" / JOB).mkdir(parents=True)
    write_shard(tmp_path / "memory" / JOB, 0, 0, 7)
    answers: queue.Queue[Inventory] = queue.Queue()
    taker = InventoryTaker((tmp_path / "memory", tmp_path / "spill"), lambda directory: tmp_path / "jobs", answers.put)
    taker.take(TakeInventory(request=5, job=JOB, directory=f"file://{tmp_path}/store", store=True))
    inventory = answers.get(timeout=30)
    assert (inventory.request, list(inventory.troubles)) == (5, [])
    held = (inventory.memory, inventory.disk, inventory.store)
    assert [[one.step for one in each] for each in held] == [[7], [10], [20]]
    taker.close()
    taker.take(TakeInventory(request=6, job=JOB, directory="no-such://bucket", store=True))
    inventory = answers.get(timeout=30)
    assert ("no-such://bucket/vit-3f9a cannot be looked at" in inventory.troubles[0], len(inventory.disk)) == (True, 1)
    taker.close()


def test_what_is_to_be_removed_is_gone_and_what_cannot_be_is_told(tmp_path: Path) -> None:
    """1. A job's folder on disk with residuals and a half-written checkpoint beside whole ones, and its store. 2. Both
    are removed, other jobs stay. 3. Once more: there is nothing left to remove. 4. A folder that is a link into
    another one is left alone, aloud."""
    jobs, store = tmp_path / "jobs", tmp_path / "store"
    for folder in (jobs, store):
        for job in (JOB, "other-0001"):
            files.write(folder / job, header(10), {"w": torch.ones(4)}, None)
    (jobs / JOB / ".writing-step-20").mkdir()
    (jobs / JOB / "residuals" / "rank-0").mkdir(parents=True)
    answers: queue.Queue[Inventory] = queue.Queue()
    taker = InventoryTaker((tmp_path / "memory", tmp_path / "spill"), lambda directory: jobs, answers.put)

    def remove(job: str) -> Inventory:
        taker.take(TakeInventory(request=7, job=job, directory=f"file://{store}", store=True, remove=True))
        answer = answers.get(timeout=30)
        taker.close()
        return answer

    for _ in range(2):
        left = remove(JOB)
        assert (left.request, list(left.disk), list(left.store), list(left.troubles)) == (7, [], [], [])
    assert not (jobs / JOB).exists()
    assert not (store / JOB).exists()
    (jobs / "linked-0001").symlink_to(jobs / "other-0001")
    assert "cannot be removed: Cannot call rmtree on a symbolic link" in " ".join(remove("linked-0001").troubles)
    assert len(checkpoints_in(jobs / "other-0001")) == len(checkpoints_under(f"file://{store}/other-0001")) == 1
