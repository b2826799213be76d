"""Plans when a step's checkpoint travels: in chunks that fit between the training's own traffic.

The planner behind `atoll decide chunks`, and what workers ask before they send: both rooms read it here.

Source: Gemini (Wang et al., 2023), Algorithm 6.2, with three slips of the print mended: a span
shrinks by what the chunk placed in it takes, not by what remains to be sent; where no chunk fits, the next span is
tried; m - 1 replicas are sent, not m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pydantic import ConfigDict, Field

from atoll.errors import BadInput
from atoll.planning.schemas import Bytes, BytesPerSecond, Seconds

MAX_CHUNKS: Final = 1_000_000
ROUNDING: Final = 1e-12
"""Tolerance, as a share of a span, so that a fit to the byte is not cut for an error of float64."""


@dataclass(frozen=True, slots=True)
class ChunksInput:
    """idle_spans: seconds of each time within a step in which training leaves the link alone, in order.
    checkpoint_bytes: of one machine. replicas: m, its own included, so m - 1 are sent.
    buffers, buffer_bytes: into how many equal parts so many bytes are divided; a chunk fits one part.
    bandwidth: bytes a second; alpha: seconds that a chunk costs beside; mu: usable share of a span, of (0, 1]."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    idle_spans: Annotated[tuple[Seconds, ...], Field(min_length=1, max_length=100_000)]
    checkpoint_bytes: Bytes
    replicas: Annotated[int, Field(ge=1, le=1000)]
    buffers: Annotated[int, Field(ge=1, le=4096)]
    buffer_bytes: Bytes
    bandwidth: BytesPerSecond
    alpha: Seconds
    mu: Annotated[float, Field(ge=1e-6, le=1)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """span, replica: from 0. offset, bytes: of the checkpoint."""

    span: int
    replica: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ChunksPlan:
    """chunks: in the order in which they are sent. overflow_s: how much longer than its usable part the last span is
    used; fits: whether that is 0."""

    chunks: tuple[Chunk, ...]
    fits: bool
    overflow_s: float


def plan_chunks(given: ChunksInput) -> ChunksPlan:
    """Fill the spans in order, replica by replica; the last takes whatever is left, however long that lasts.

    A chunk of s bytes takes alpha + s / bandwidth seconds. Raises BadInput where a part of the buffer holds no byte, or
    where there would be more than MAX_CHUNKS chunks.
    """
    part = given.buffer_bytes // given.buffers
    if part < 1:
        raise BadInput(f"buffer_bytes = {given.buffer_bytes} gives {given.buffers} buffers no byte each. Raise it")
    sent = given.replicas - 1
    if (least := sent * -(-given.checkpoint_bytes // part)) > MAX_CHUNKS:
        raise BadInput(
            f"buffer_bytes = {given.buffer_bytes} in {given.buffers} buffers makes {least} chunks of the "
            f"checkpoint; at most {MAX_CHUNKS} are planned. Raise it or lower buffers"
        )
    chunks: list[Chunk] = []
    replica, offset, overflow_s = 0, 0, 0.0
    for span, idle_s in enumerate(given.idle_spans):
        usable_s = given.mu * idle_s
        last = span == len(given.idle_spans) - 1
        count, used = 0, 0
        while replica < sent:
            free = (usable_s * (1 + ROUNDING) - (count + 1) * given.alpha) * given.bandwidth - used
            size = min(part if last else math.floor(min(part, free)), given.checkpoint_bytes - offset)
            if size <= 0:
                break
            chunks.append(Chunk(span, replica, offset, size))
            count, used, offset = count + 1, used + size, offset + size
            if offset == given.checkpoint_bytes:
                replica, offset = replica + 1, 0
        overflow_s = count * given.alpha + used / given.bandwidth - usable_s
    fits = overflow_s <= ROUNDING * given.mu * given.idle_spans[-1]  # the last one's: the others never overflow
    return ChunksPlan(tuple(chunks), fits, 0.0 if fits else overflow_s)
