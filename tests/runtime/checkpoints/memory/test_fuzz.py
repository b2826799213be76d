"""Whatever lies in memory or comes from a peer: it is what was written, or refused in words. Nothing else is raised,
and nothing of it is used."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))  # for mutated

from mutated import mutated

from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.state import pack_state, unpack_state
from atoll.agent.runtime.checkpoints.memory.recovery.assembly import SharedState, assembled, own_state
from atoll.agent.runtime.checkpoints.memory.shards.live_state import laid_out, listed
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import (
    _HEAD,
    PAGE_BYTES,
    hashes,
    own_of,
    parse,
    without_own,
)
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation, HeldShard, decode, encode
from atoll.errors import AtollError, CheckpointError

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, 2.0], dtype=torch.float64)}
GROUPS = [{"lr": 0.1, "params": [0, 1]}]
RESTING, TREE = pack_state({"model": dict(MODEL), "optimizer": {"state": {}, "param_groups": [{"params": [0, 1]}]}})
_, MOVING = pack_state({"groups": [{"lr": 0.1}], "tracked.x": {"n": (1, 2.5), "far": float("inf")}})
LAYOUT = json.loads(laid_out(listed(RESTING), TREE, fingerprint(MODEL).to_json()).raw)
DATA = b"".join(one.contiguous().numpy().tobytes() for one in RESTING.values())
HEADER = Header(
    job="tiny", run=3, step=9, epoch=0, consumed=1, loader_step=9, world_size=1, seed=7, model=fingerprint(MODEL)
).to_json()
OWED = {"tensors": [["owed.w", "float32", [6]]], "aliases": {"model/w": ["model/w", [2, 3], [3, 1]]}, "tree": TREE}
TAIL = {
    "shard": 0,
    "shards": 1,
    "begin": 0,
    "size": len(DATA),
    "total": len(DATA),
    "header": {name: value for name, value in HEADER.items() if name != "model"},
    "moving": MOVING,
    "chunks": hashes(np.frombuffer(DATA, np.uint8)),
    "own": None,
    "own_chunks": [],
}


def sealed(layout: Any, tail: Any, data: bytes = DATA, own: bytes = b"") -> bytes:
    """A file whose hashes are all right."""
    raw_layout, raw_tail = json.dumps(layout).encode(), json.dumps(tail).encode()
    own_at = -(-(PAGE_BYTES + len(raw_layout)) // PAGE_BYTES) * PAGE_BYTES
    digests = xxhash.xxh3_128_digest(raw_layout), xxhash.xxh3_128_digest(raw_tail)
    head = _HEAD.pack(b"ATOLLME2", len(raw_layout), len(own), len(data), len(raw_tail), own_at, *digests)
    page = (head + xxhash.xxh3_128_digest(head)).ljust(PAGE_BYTES, b"\0")
    return (page + raw_layout).ljust(own_at, b"\0") + own + data + raw_tail


def loaded(content: bytes) -> dict[str, Any]:
    """The states in a file that is the only shard."""
    shard = parse(np.frombuffer(content, np.uint8))
    state = SharedState.of([shard])
    checkpoint = assembled(state, 0, shard.own)
    if shard.tail.own is not None:
        own_state(state, 0, shard.own)
    return unpack_state(checkpoint.tensors, checkpoint.scalars)


WHOLE = sealed(LAYOUT, TAIL)


def test_the_untouched_file_is_read() -> None:
    states = loaded(WHOLE)
    assert torch.equal(states["model"]["w"], MODEL["w"])
    assert states["optimizer"]["param_groups"] == GROUPS
    assert states["tracked.x"] == {"n": (1, 2.5), "far": float("inf")}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("length", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 10, len(WHOLE) - 1])
def test_what_is_cut_off_is_refused(length: int, own: bool) -> None:
    content = np.frombuffer(WHOLE[:length] or b"\0", np.uint8)
    with pytest.raises(CheckpointError):
        parse(content, own=own)
    without_own(content)  # who hands it on does not look


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_flipped_moved_and_cut_bytes_are_refused_or_were_padding(data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        run = data.draw(st.integers(1, 64))
        match data.draw(st.sampled_from(["flip", "zero", "swap", "drop", "double"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "zero":
                content[at : at + run] = bytes(len(content[at : at + run]))
            case "swap":
                content[at : at + run] = content[at : at + run][::-1]
            case "drop":
                del content[at : at + run]
            case _:
                content[at:at] = content[at : at + run]
        if not content:
            break
    check_refused_or(content, loaded(WHOLE))


def check_refused_or(content: bytes | bytearray, expected: dict[str, Any]) -> None:
    try:
        states = loaded(bytes(content) or b"\0")
    except AtollError:
        return
    for name, tensor in expected["model"].items():
        assert torch.equal(states["model"][name], tensor)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mutated({"layout": LAYOUT, "tail": TAIL}))
def test_a_file_by_somebody_who_knows_the_hashes_is_refused_in_words(body: Any) -> None:
    try:
        loaded(sealed(body.get("layout"), body.get("tail")))
    except AtollError:
        return


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mutated({"tail": {**TAIL, "own": OWED, "own_chunks": hashes(np.zeros(24, np.uint8))}}))
def test_so_is_one_with_what_a_rank_owes(body: Any) -> None:
    content = sealed(LAYOUT, body.get("tail"), own=bytes(24))
    assert bytes(own_of(np.frombuffer(content, np.uint8))) == bytes(24)
    try:
        loaded(content)
    except AtollError:
        return


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9000), min_size=5, max_size=5))
def test_a_head_with_any_sizes_is_refused_in_words(sizes: list[int]) -> None:
    head = _HEAD.pack(b"ATOLLME2", *sizes, bytes(16), bytes(16))
    content = np.frombuffer((head + xxhash.xxh3_128_digest(head)).ljust(3 * PAGE_BYTES, b"\0"), np.uint8)
    for own in (True, False):
        with pytest.raises(CheckpointError):
            parse(content, own=own)
    own_of(content)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_what_a_rank_says_it_holds_is_sound_or_refused(data: st.DataObject) -> None:
    """1. A rank lists two shards. 2. One byte of what it says is another. 3. What is believed makes sense."""
    held = [HeldShard(Generation(3, 9, 2, "abc"), shard, 0) for shard in (0, 1)]
    raw = bytearray(encode(held))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        said = decode(bytes(raw))
    except CheckpointError:
        return
    assert all(0 <= one.shard < one.generation.shards for one in said)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for read in (lambda: parse(np.frombuffer(noise or b"\0", np.uint8)), lambda: decode(struct.pack("B", 0) + noise)):
        with pytest.raises(CheckpointError):
            read()
