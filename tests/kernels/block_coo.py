"""Sparse updates on the wire, and the sum of several workers' updates.

A payload is the indices, then the values, little-endian, without a header: how many units, of which tensor and in which
formats is for the message around it. Indices are "delta" (gaps in LEB128: mostly one byte each at a sparsity of 99 %)
or "none" (both ends have them from `random_blocks`). Values are
"float32"; "float16" or "bfloat16"; "int8" or "int4", with a bfloat16 scale for each 16 values; or "int2", sign and one
of two magnitudes for each 512. A unit is a block of 16 entries.

index: uint32 or int32 [K], ascending; values: float32 [K, 16]. `entries` is the tensor's length. Whatever does not
fit raises `BadInput`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import native_parts

from atoll.kernels.exchange_engine import Values
from atoll.kernels.refusals import refusals

Indices = Literal["none", "delta"]


def payload_bound(count: int, *, indices: Indices = "delta", value_format: Values = "float32") -> int:
    """The most bytes a payload of so many units can have."""
    with refusals("payload_bound"):
        return native_parts.load().payload_bound(count, indices, value_format)


def encode(
    index: Any,
    values: Any,
    entries: int,
    out: Any,
    *,
    residual: Any = None,
    indices: Indices = "delta",
    value_format: Values = "float32",
) -> int:
    """Write a payload to the start of out (uint8, `payload_bound` bytes or more); return its length in bytes.

    residual: float32 [entries] or None. Formats but float32 round (and what is beyond a 16-bit one's range becomes its
    largest number); what that takes away is added to the residual, so that what is sent plus the residual stays what
    it was. The sender must apply what it sent: decode its own payload, or ranks will differ.
    """
    with refusals("encode"):
        return native_parts.load().encode(index, values, entries, out, residual, indices, value_format)


def decode(
    payload: Any,
    entries: int,
    index: Any,
    values: Any,
    *,
    indices: Indices = "delta",
    value_format: Values = "float32",
) -> None:
    """Read a payload of exactly as many units as index has room for.

    payload: uint8, or bytes; may hold anything: a payload that is too short or too long, indices that do not ascend or
    lie outside, a NaN or an infinity raise `BadInput`, and what index and values then hold is undefined. Values beyond
    the tensor's end (of a shorter last block) come out as 0.
    With indices="none", index is read: the blocks that both ends know.
    """
    with refusals("decode"):
        native_parts.load().decode(payload, entries, index, values, indices, value_format)


def sum_units(
    indices: Sequence[Any],
    values: Sequence[Any],
    out_index: Any,
    out_values: Any,
    *,
    threads: int = 0,
) -> int:
    """Sum the updates of up to 64 workers, merged by index; return how many units the sum has.

    A unit that several workers have is ((first + second) + third) ... in the order of the lists, each sum rounded to
    float32: ranks that pass the same updates in the same order get the same bits, for every number of threads.
    out_index: [C], out_values: [C, 16]; more units than C raise `BadInput`, and nothing is written.
    """
    with refusals("sum_units"):
        return native_parts.load().sum_units(indices, values, out_index, out_values, threads)


def random_blocks(seed: int, blocks: int, index: Any) -> None:
    """Fill index [K], K <= blocks, with different blocks in ascending order: one of each of K equal intervals.

    seed: 0..2^64-1. The same seed gives the same blocks everywhere; every block is as likely as any other (to one part
    in blocks / K, the length of an interval).
    """
    with refusals("random_blocks"):
        native_parts.load().random_blocks(seed, blocks, index)
