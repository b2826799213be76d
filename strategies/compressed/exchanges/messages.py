"""Encode and decode a message between two ranks: a range of a group's entries, compressed or whole, and its counts.

A header, then float32 counts, then the entries, little-endian. The receiver checks it before use. A leader sends its
island the received messages as one: each behind its length."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.strategies.compressed.codes.compressors import CodePlace, Compressor, Payload, expect_bytes, read

# form, counts, first entry of the model, entries
_HEADER: Final = struct.Struct("<BxxxIQQ")
HEADER_BYTES: Final = _HEADER.size
_LENGTH: Final = struct.Struct("<Q")
_SMALL_BYTES: Final = 64
"""Bytes of a message beside entries, header and counts: means, scales, its own length."""


class EntryForm(IntEnum):
    """Code of the entries. WHOLE, float32: entries that are not compressed, or not finite."""

    WHOLE = 0
    CODE = 1


@dataclass(frozen=True, slots=True)
class Entries:
    """Contents of a message. counts: float32 [C]; payload: of the compressor, or float32 [N]."""

    form: EntryForm
    counts: NDArray[np.float32]
    payload: memoryview

    def add_to(self, out_N: torch.Tensor, compressor: Compressor, place: CodePlace) -> None:
        """Encode a message. Raises BadInput."""
        if self.form is EntryForm.CODE:
            compressor.decompress(self.payload, out_N, place)
        else:
            expect_bytes(self.payload, 4 * len(out_N))
            out_N.add_(read(self.payload, "<f4", 0, len(out_N), out_N.device))


def encode(
    form: EntryForm, place: CodePlace, entries: int, counts: NDArray[np.float32], payload: Payload
) -> memoryview:
    header = np.frombuffer(_HEADER.pack(form, len(counts), place.first, entries), np.uint8)
    return np.concatenate([header, counts.astype("<f4").view(np.uint8), payload]).data


def decode(message: bytes | memoryview, place: CodePlace, entries: int, counts: int) -> Entries:
    """Decode a message. Raises BadInput if it contradicts itself or is not the expected one."""
    if len(message) < HEADER_BYTES:
        raise BadInput(f"it has {len(message)} bytes; its header alone has {HEADER_BYTES}")
    form, counted, first, said = _HEADER.unpack_from(message)
    if form not in {EntryForm.WHOLE, EntryForm.CODE}:
        raise BadInput(f"form {form} means nothing")
    if (first, said, counted) != (place.first, entries, counts):
        raise BadInput(
            f"it has {said} entries from {first} on and {counted} counts: {entries} from {place.first} on and "
            f"{counts} counts were expected"
        )
    body = HEADER_BYTES + 4 * counts
    if len(message) < body:
        raise BadInput(f"its header says {counts} counts, and it has {len(message)} bytes")
    counted_C = np.frombuffer(message, "<f4", counts, HEADER_BYTES)
    return Entries(EntryForm(form), counted_C, memoryview(message)[body:])


def largest(ranks: int, entries: int, counts: int) -> int:
    """Return an upper bound of a message's bytes, even of one with all ranks' messages: an entry takes eight at
    most."""
    return ranks * (8 * entries + HEADER_BYTES + 4 * counts + _SMALL_BYTES)


def bundled(messages: Sequence[bytes | memoryview]) -> memoryview:
    """Join several messages into one."""
    parts = [np.frombuffer(one, np.uint8) for one in messages]
    lengths = [np.frombuffer(_LENGTH.pack(len(one)), np.uint8) for one in parts]
    return np.concatenate([each for pair in zip(lengths, parts, strict=True) for each in pair]).data


def unbundled(message: bytes | memoryview, expected: int) -> list[memoryview]:
    """Split joined messages. Raises BadInput if their number is not the expected one, or lengths do not fit."""
    rest = memoryview(message)
    found: list[memoryview] = []
    for _ in range(expected):
        if len(rest) < _LENGTH.size:
            raise BadInput(f"{expected} messages were expected in it, and {len(found)} are there")
        (length,) = _LENGTH.unpack_from(rest)
        if length > len(rest) - _LENGTH.size:
            raise BadInput(f"a message in it has {length} bytes, and {len(rest) - _LENGTH.size} are left")
        found.append(rest[_LENGTH.size : _LENGTH.size + length])
        rest = rest[_LENGTH.size + length :]
    if len(rest):
        raise BadInput(f"{len(rest)} bytes more than its {expected} messages")
    return found
