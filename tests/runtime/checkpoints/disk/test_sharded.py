"""Checkpoints of which each rank writes a shard: whole when the last one is there, else they do not exist."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.agent.runtime.checkpoints.disk import fence, files, listing, manifest
from atoll.agent.runtime.checkpoints.disk.files import Share, shares
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.disk.store import Store
from atoll.errors import CheckpointError

RANKS = 3
SCALARS = {"dict": [["lr", 0.1]]}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(files, "SMALL_BYTES", 1000)


def state(step: int) -> dict[str, torch.Tensor]:
    large = {f"model/{index}": torch.full((100 + index, 300), float(step)) for index in range(8)}
    return {**large, "model/running_mean": torch.full((16,), float(step))}


def write(directory: Path, header: Any, step: int, rank: int, **changes: Any) -> Path | None:
    tensors = state(step)
    share = shares(tensors, RANKS)[rank]
    share = Share(share.shard, share.shards, share.names, changes.get("layout", share.layout))
    own = {name: tensor for name, tensor in tensors.items() if name in share.names}
    return files.write_shard(directory, header(step), share, own, SCALARS if rank == 0 else None)


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith((".writing", ".removing")))


def same(found: Any, step: int) -> bool:
    expected = state(step)
    assert found.tensors.keys() == expected.keys()
    return all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items())


def test_each_tensor_is_in_one_share_and_shares_are_alike() -> None:
    tensors = state(1)
    found = shares(tensors, RANKS)
    assert sorted(name for share in found for name in share.names) == sorted(tensors)
    taken = [sum(tensors[name].nbytes for name in share.names) for share in found]
    assert max(taken) < 1.5 * min(taken)
    assert "model/running_mean" in found[0].names, "what ranks may have differently is the first one's"
    assert [share.shard for share in found] == [0, 1, 2]
    assert found == shares(dict(reversed(tensors.items())), RANKS)
    assert len(shares(tensors, 100)) == sum(one.nbytes for one in tensors.values()) // 100_000
    assert shares({"w": torch.zeros(2)}, RANKS)[0].names == {"w"}, "a small state has one shard"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_who_writes_the_last_shard_publishes(tmp_path: Path, header: Any, order: tuple[int, ...]) -> None:
    """1. Rank 0 wrote all of a state while others waited for nothing. 2. Each writes a shard; before the last there is
    no checkpoint. 3. Together they are the state, with rank 0's scalars; every tool reads the files."""
    for rank in order[:-1]:
        assert write(tmp_path, header, 100, rank) is None
        assert listing.newest(tmp_path, pytest.fail) == []
    path = write(tmp_path, header, 100, order[-1])
    assert path is not None
    assert same(files.read(path), 100)
    assert files.read(path).scalars == SCALARS
    names = [f"state-{shard:05d}-of-00003.safetensors" for shard in (1, 2, 3)]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *names]
    read = {name: tensor for file in names for name, tensor in load_file(path / file).items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in state(100).items())
    assert listing.check_sound(path).state_bytes == sum((path / name).stat().st_size for name in names)
    assert left(tmp_path) == []


def test_a_rank_killed_while_it_writes_leaves_no_checkpoint_and_the_older_one_is_taken(
    tmp_path: Path, header: Any
) -> None:
    """1. Step 100 is whole. 2. Of step 200 one rank is killed (SIGKILL) in the middle of its shard. 3. Step 100 counts;
    what is left of 200 stays while another rank may still come, and goes when step 300 begins."""
    for rank in range(RANKS):
        write(tmp_path, header, 100, rank)
    begun, begin = os.pipe()
    pid = os.fork()
    if pid == 0:

        def parts(tensors: Any) -> Iterator[memoryview]:
            yield memoryview(b"half of it")
            os.write(begin, b".")
            signal.pause()

        files.serialized = parts
        write(tmp_path, header, 200, 2)
        os._exit(0)
    os.read(begun, 1)
    assert write(tmp_path, header, 200, 0) is None
    write_alive = left(tmp_path)
    files.write(tmp_path, header(150), state(150), None)  # another begins beside it
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(begun)
    os.close(begin)
    assert write(tmp_path, header, 200, 1) is None
    assert write_alive == left(tmp_path) == [f".writing-{Moment(3, 200).name}-shared"]
    assert [one.step for one in listing.newest(tmp_path, pytest.fail)] == [150, 100]
    for rank in range(RANKS):
        write(tmp_path, header, 300, rank)
    assert left(tmp_path) == []
    assert [one.step for one in listing.newest(tmp_path, pytest.fail)] == [300, 150, 100]


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_a_shard_that_is_missing_or_damaged_is_named_and_the_older_checkpoint_taken(
    tmp_path: Path, header: Any, damage: str
) -> None:
    for step in (100, 200):
        for rank in range(RANKS):
            write(tmp_path, header, step, rank)
    file = tmp_path / Moment(3, 200).name / "state-00002-of-00003.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "shorter":
        os.truncate(file, 1000)
    else:
        with file.open("r+b") as opened:
            opened.seek(50_000)
            opened.write(b"\x55")
    said: list[str] = []
    found = files.newest_valid(tmp_path, said.append)
    assert found is not None
    assert same(found, 100)
    assert str(file) in said[0]
    assert "step-000000100-run-000003 is tried in its place" in said[0]
    assert listing.is_whole(file.parent) == (damage == "flipped")
    assert not listing.is_sound(file.parent)


def test_shards_of_a_fenced_run_are_refused(tmp_path: Path, header: Any) -> None:
    for rank in (0, 1):
        write(tmp_path, header, 100, rank)
    fence.take(tmp_path, 4)
    with pytest.raises(CheckpointError, match="run 3 was fenced by run 4"):
        write(tmp_path, header, 100, 2)
    assert listing.newest(tmp_path, pytest.fail) == []


def test_shards_of_other_tensors_are_no_checkpoint(tmp_path: Path, header: Any) -> None:
    write(tmp_path, header, 100, 0)
    write(tmp_path, header, 100, 1, layout="another")
    with pytest.raises(CheckpointError, match="shards of step-000000100-run-000003 are of different tensors"):
        write(tmp_path, header, 100, 2)
    assert listing.newest(tmp_path, pytest.fail) == []


def test_a_manifest_names_no_file_elsewhere(tmp_path: Path, header: Any) -> None:
    for rank in range(RANKS):
        path = write(tmp_path, header, 100, rank)
    assert path is not None
    body = manifest.unsealed((path / "manifest.json").read_bytes())
    del body["xxh3_128"]
    body["state"][1]["file"] = "../../secret"
    (path / "manifest.json").write_bytes(manifest.sealed(body))
    with pytest.raises(CheckpointError, match="it speaks of the files"):
        files.read(path)


def test_a_store_takes_and_gives_all_shards(tmp_path: Path, header: Any) -> None:
    """1. All shards are uploaded, then the manifest. 2. One is gone: what is left does not count. 3. Else it is read,
    and brought to another directory."""
    for rank in range(RANKS):
        path = write(tmp_path / "here", header, 100, rank)
    assert path is not None
    store, moment = Store(f"memory://{uuid.uuid4().hex}"), Moment(3, 100)
    sealed = (path / "manifest.json").read_bytes()
    assert store.put(sealed, lambda name: listing.parts(path / name))
    assert store.list().whole[moment].state_bytes == listing.check_whole(path).state_bytes
    found, raw = store.manifest(moment)
    assert raw == sealed
    assert same(files.read_opened(found, partial(store.opened, moment), store.url), 100)
    back = files.adopt(tmp_path / "there", sealed, partial(store.state, moment), 9)
    assert same(files.read(back), 100)
    store._files.rm_file(f"{store._folder(moment)}/state-00003-of-00003.safetensors")
    assert store.list().torn == {moment}
