"""The frame between two workers: a fixed header, then the payload as it is. Little-endian, checked by xxh3."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from xxhash import xxh3_64_intdigest

from atoll.errors import BadInput

VERSION: Final = 1
MAX_PAYLOAD_BYTES: Final = 1 << 30
"""A tensor of 100 M float32 entries sent whole fits twice."""

MAGIC: Final = b"ATLF"
SHARED_MAGIC: Final = b"ATLS"
"""Replaces MAGIC if the payload lies in shared memory: only its location follows. The receiver fetches it and
restores MAGIC. The checksum leaves it out, since one header serves all receivers and only some share memory."""

MAX_ORDER: Final = 2**32 - 1  # the least urgent of its step

# version, kind, run, step, tensor, order, origin, count, length of the payload; behind it the checksum
_FIELDS: Final = struct.Struct("<BBQQIIIII")
_CHECKSUM: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<4sBBQQIIIIIQ")
HEADER_BYTES: Final = _HEADER.size


class Kind(IntEnum):
    PART = 0  # what one rank selected of one tensor, for the mates of its island; origin: the rank
    SUM = 1  # an island's sum, from its leader; origin: the island's index
    CONTROL = 2  # from one rank to all; origin: the rank
    DIGEST = 3  # from one rank to all
    GOODBYE = 4  # this rank leaves on purpose
    HELLO = 5  # first on each connection, between the transports only
    DIRECT = 6  # from one rank to one of its peers, and no further; origin: the rank
    TO_AGGREGATOR = 7  # an island's sum of one tensor, from leader to the aggregator's leader; origin: the island
    FROM_AGGREGATOR = 8  # the total of one tensor, from the aggregator's leader to all; origin: the aggregator's island


class Flaw(StrEnum):
    DAMAGED = "damaged"
    VERSION = "other version"


class FrameError(BadInput):
    """Received bytes are no valid frame."""

    def __init__(self, reason: Flaw, detail: str) -> None:
        super().__init__(f"{reason}: {detail}. It was dropped")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. step, run: up to 2^64 - 1; tensor, order, origin, count: up to 2^32 - 1. order: urgency within the
    step, smaller first."""

    kind: Kind
    run: int
    step: int
    tensor: int
    order: int
    origin: int
    count: int
    payload: bytes | memoryview


def encode(frame: Frame) -> bytes:
    """The header; the payload is sent behind it without a copy. Raises BadInput where a field does not fit."""
    length = len(frame.payload)
    if length > MAX_PAYLOAD_BYTES:
        raise BadInput(f"a payload of {length} bytes is too large to send: at most {MAX_PAYLOAD_BYTES} fit a frame")
    try:
        fields = _FIELDS.pack(
            VERSION, frame.kind, frame.run, frame.step, frame.tensor, frame.order, frame.origin, frame.count, length
        )
    except struct.error as error:
        raise BadInput(
            f"{frame.kind.name} of step {frame.step}, tensor {frame.tensor} fits no frame: {error}"
        ) from error
    return MAGIC + fields + _CHECKSUM.pack(_checksum(fields, frame.payload))


def decode(header: bytes, payload: bytes | memoryview) -> Frame:
    """The frame of a header and the payload that came with it. Raises FrameError; never looks past what came."""
    if len(header) != HEADER_BYTES:
        raise FrameError(Flaw.DAMAGED, f"a header has {HEADER_BYTES} bytes, not {len(header)}")
    magic, version, kind, run, step, tensor, order, origin, count, length, checksum = _HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError(Flaw.DAMAGED, f"it begins with {magic!r}")
    if version != VERSION:
        raise FrameError(Flaw.VERSION, f"this worker speaks version {VERSION}, not {version}")
    if length != len(payload):
        raise FrameError(Flaw.DAMAGED, f"{length} bytes were announced and {len(payload)} came")
    if checksum != _checksum(header[4 : 4 + _FIELDS.size], payload):
        raise FrameError(Flaw.DAMAGED, "the checksum is wrong")
    if kind not in _KINDS:
        raise FrameError(Flaw.DAMAGED, f"kind {kind} is unknown")
    return Frame(_KINDS[kind], run, step, tensor, order, origin, count, payload)


def payload_bytes(header: bytes) -> int:
    """Return the payload's length from a header, of which only the length is checked.

    Raises FrameError."""
    if len(header) != HEADER_BYTES:
        raise FrameError(Flaw.DAMAGED, f"a header has {HEADER_BYTES} bytes, not {len(header)}")
    return int(_HEADER.unpack(header)[9])


_KINDS: Final = {int(kind): kind for kind in Kind}


def _checksum(fields: bytes, payload: bytes | memoryview) -> int:
    """xxh3_64 of the payload, seeded with that of the fields: every bit of both counts."""
    return xxh3_64_intdigest(payload, xxh3_64_intdigest(fields))
