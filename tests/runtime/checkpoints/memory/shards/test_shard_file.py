"""Whatever happens to the bytes of a shard, it is read whole or refused in words."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import (
    CHUNK_BYTES,
    SlotFile,
    Tail,
    Unsealed,
    bounds,
    content_of,
    parse,
)
from atoll.errors import CheckpointError

MODEL = Fingerprint({"w": ("float32", (3,))})
HEADER = Header(
    job="tiny", run=3, step=9, epoch=0, consumed=1, loader_step=9, world_size=2, seed=7, model=Fingerprint({})
)
LAYOUT = b'{"model": %s, "tensors": []}' % str(MODEL.to_json()).replace("'", '"').encode()


def write(path: Path, data: bytes, *, shard: int = 0, **changed: Any) -> SlotFile:
    file = SlotFile(path)
    target = file.begin(LAYOUT, xxhash.xxh3_128_digest(LAYOUT), len(data))
    target[:] = np.frombuffer(data, np.uint8)
    begin, end = bounds(2 * len(data), shard, 2)
    fields = {"shard": shard, "shards": 2, "begin": begin, "size": end - begin, "total": 2 * len(data)} | changed
    header = {name: value for name, value in HEADER.to_json().items() if name != "model"}
    tail = Tail(**fields, header=header, moving={}, chunks=())
    hashes = [xxhash.xxh3_64_hexdigest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    file.seal(tail.sealed(hashes))
    return file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write(tmp_path / "a.mem", bytes(range(200))).close()
    return tmp_path / "a.mem"


@pytest.mark.parametrize("size", [0, 1, 4095, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_what_was_sealed_is_read_again(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    write(tmp_path / "a.mem", data, shard=1).close()
    shard = parse(content_of(tmp_path / "a.mem"))
    assert shard.data.tobytes() == data
    assert (shard.header.run, shard.header.step, shard.header.model) == (3, 9, MODEL)
    assert (shard.tail.shard, shard.tail.begin) == (1, size)


def test_a_slot_is_written_again_with_more_and_with_less(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / "a.mem")
    file.close()
    for size in (5000, 70_000, 3):
        write(tmp_path / "a.mem", bytes([size % 251]) * size).close()
        assert parse(content_of(tmp_path / "a.mem")).data.tobytes() == bytes([size % 251]) * size


def test_who_is_killed_while_writing_leaves_no_shard(small: Path) -> None:
    file = SlotFile(small)
    file.begin(LAYOUT, xxhash.xxh3_128_digest(LAYOUT), 200)[:100] = 7
    with pytest.raises(Unsealed, match="not written to its end"):
        parse(content_of(small))
    file.close()


def test_a_flipped_bit_is_never_read(small: Path) -> None:
    whole = small.read_bytes()
    parse(content_of(small))
    rng = random.Random(1)
    used = parse(content_of(small))
    ends = len(whole)
    places = [0, 8, 30, 70, 4096, 4100, ends - 1, ends - 50, *rng.sample(range(4096, 4096 + len(LAYOUT)), 10)]
    data_at = whole.index(bytes(range(200)))
    for place in [*places, *range(data_at, data_at + 200, 17)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        small.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            parse(content_of(small))
    assert used.tail.size == 200


def test_a_truncated_file_is_never_read(small: Path) -> None:
    whole = small.read_bytes()
    for length in (0, 1, 80, 4095, 4096, len(whole) // 2, len(whole) - 1):
        small.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            parse(content_of(small))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"shard": 2}, "cannot be bytes"),
        ({"begin": 4}, "cannot be bytes"),
        ({"total": 10**9}, "cannot be bytes"),
        ({"size": -1}, "not a whole number"),
        ({"total": 1.5}, "not a whole number"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    write(tmp_path / "a.mem", bytes(64), **changed).close()
    with pytest.raises(CheckpointError, match=why):
        parse(content_of(tmp_path / "a.mem"))


def test_a_head_that_lies_about_sizes_is_refused(small: Path) -> None:
    """As a peer could make one: its own hash is right."""
    whole = bytearray(small.read_bytes())
    for at in (8, 16, 24, 32, 40):
        lying = bytearray(whole)
        lying[at : at + 8] = (2**62).to_bytes(8, "little")
        lying[80:96] = xxhash.xxh3_128_digest(bytes(lying[:80]))
        small.write_bytes(lying)
        with pytest.raises(CheckpointError):
            parse(content_of(small))


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64 * 1024)
    file = SlotFile(disk / "a.mem")
    with pytest.raises(CheckpointError, match="No space left"):
        file.begin(LAYOUT, xxhash.xxh3_128_digest(LAYOUT), 1 << 20)
    assert len(file.begin(LAYOUT, xxhash.xxh3_128_digest(LAYOUT), 4096)) == 4096
    file.close()


def test_what_is_less_needed_gives_way(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(256 * 1024)
    (disk / "old").write_bytes(bytes(200 * 1024))

    def make_room() -> bool:
        (disk / "old").unlink()
        return True

    file = SlotFile(disk / "a.mem", make_room)
    assert len(file.begin(LAYOUT, xxhash.xxh3_128_digest(LAYOUT), 150 * 1024)) == 150 * 1024
    file.close()
    assert not (disk / "old").exists()


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path, small: Path) -> None:
    os.symlink(small, tmp_path / "b.mem")
    with pytest.raises(CheckpointError):
        content_of(tmp_path / "b.mem")
    with pytest.raises(CheckpointError):
        SlotFile(tmp_path / "b.mem")
