"""Whatever happens to the bytes of a checkpoint, it is read whole or refused in words."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.agent.runtime.checkpoints.disk import files, transfer
from atoll.agent.runtime.checkpoints.disk.tensorfile import deserialized
from atoll.errors import CheckpointError


@pytest.fixture
def small(header: Any, tmp_path: Path) -> Path:
    tensors = {
        "model/w": torch.arange(64.0).reshape(8, 8),
        "step": torch.tensor(3),
        "mask": torch.tensor([True, False]),
    }
    return files.write(tmp_path, header(), tensors, {"lr": 0.1})


def lengths(size: int) -> Iterator[int]:
    yield from {0, 1, 7, 8, 9, size // 4, size // 2, size - 33, size - 2, size - 1}
    yield from random.Random(1).sample(range(size), 30)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_truncated_file_is_never_loaded(small: Path, name: str) -> None:
    whole = (small / name).read_bytes()
    for length in lengths(len(whole)):
        (small / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=name):
            files.read(small)
    (small / name).write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=name):
        files.read(small)
    (small / name).write_bytes(whole)
    files.read(small)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_flipped_bit_is_never_loaded(small: Path, name: str) -> None:
    whole = (small / name).read_bytes()
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << (index % 8)
        (small / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            files.read(small)


def test_zeroed_blocks_and_swapped_files_are_never_loaded(small: Path, header: Any, tmp_path: Path) -> None:
    other = files.write(tmp_path, header(101), {"model/w": torch.zeros(8, 8)}, None)
    for path, foreign in ((small, other), (other, small)):
        state, manifest = path / "state.safetensors", path / "manifest.json"
        whole = state.read_bytes()
        state.write_bytes(bytes(len(whole)))
        with pytest.raises(CheckpointError, match="state"):
            files.read(path)
        state.write_bytes(whole)
        kept = manifest.read_bytes()
        manifest.write_bytes((foreign / "manifest.json").read_bytes())
        with pytest.raises(CheckpointError, match="is torn"):
            files.read(path)
        manifest.write_bytes(kept)


def test_bytes_from_a_peer_are_taken_whole_or_not_at_all(small: Path) -> None:
    checkpoint = files.read(small)
    listing = transfer.listed(checkpoint)
    wanted = listing.lacking({})
    said, sent = transfer.to_bytes(listing), transfer.gathered(listing, wanted, checkpoint.tensors)
    for length in lengths(len(said)):
        with pytest.raises(CheckpointError, match="peer"):
            transfer.from_bytes(said[:length])
    for index in range(0, len(said), 3):
        damaged = bytearray(said)
        damaged[index] ^= 0x80 >> (index % 8)
        with pytest.raises(CheckpointError, match="peer"):
            transfer.from_bytes(bytes(damaged))
    noise = random.Random(2)
    for _ in range(200):
        with pytest.raises(CheckpointError, match="peer"):
            transfer.from_bytes(noise.randbytes(noise.randrange(200)))
    for length in lengths(len(sent)):
        with pytest.raises(CheckpointError, match="peer"):
            listing.read(wanted, sent[:length].copy(), {})
    for index in range(0, len(sent), 3):
        hit = sent.copy()
        hit[index] ^= 0x80 >> (index % 8)
        with pytest.raises(CheckpointError, match="peer"):
            listing.read(wanted, hit, {})


@pytest.mark.parametrize(
    "header_text",
    [
        *(b"", b"[]", b"3", b"{", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b"[" * 5000, b"\xff\xfe"),
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [99999999999999], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 1000000000000000000000], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": true, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_malformed_tensor_header_is_refused(tmp_path: Path, header_text: bytes) -> None:
    file = tmp_path / "x"
    file.write_bytes(len(header_text).to_bytes(8, "little") + header_text + bytes(4))
    with file.open("rb", buffering=0) as source, pytest.raises(CheckpointError):
        deserialized(source, os.fstat(source.fileno()).st_size)
