"""A message between two ranks: coordinates of one partition of a tensor, in the form that takes the fewest bytes.

A header, then the indices, then float32 values, little-endian. Everything of a message is checked against what its
receiver knows before it is used."""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import Final

import numpy as np

from atoll.errors import BadInput
from atoll.kernels import units
from atoll.strategies.zen.coordinates import F32, U32, Coordinates, GradientLayout, SumTally, UnitShape, summed

INDEX_BYTES: Final = 4
VALUE_BYTES: Final = 4

# form, layouts, choice; entries of a unit, units, partition; units and blocks that ranks had, goodput
_HEADER: Final = struct.Struct("<BBBxIIIQQd")
HEADER_BYTES: Final = _HEADER.size


class Form(IntEnum):
    """What stands for the indices. With DENSE every member of the partition is there, so nothing does."""

    COO = 0
    BITMAP = 1
    DENSE = 2


def encode(part: Coordinates, shape: UnitShape, partition: int, member: U32 | None) -> memoryview:
    """member: all units of the partition, ascending, where both ends know them: the form is then the shortest, with
    Zen's hash bitmap; None: COO."""
    count, width = part.values.shape
    form, index = Form.COO, part.unit.view(np.uint8)
    if member is not None and _index_bytes(Form.BITMAP, count, len(member)) < INDEX_BYTES * count:
        part = summed([part], shape) if _unordered(part.unit) else part
        form, index = Form.DENSE, np.zeros(0, np.uint8)
        if count < len(member):
            form, index = Form.BITMAP, np.empty(units.bitmap_bytes(len(member)), np.uint8)
            units.bitmap_encode(member, part.unit, index)
    tally = part.tally
    payload = np.empty(HEADER_BYTES + len(index) + VALUE_BYTES * part.values.size, np.uint8)
    _HEADER.pack_into(
        payload.data,
        0,
        form,
        tally.layouts,
        tally.choice,
        width,
        count,
        partition,
        tally.units,
        tally.blocks,
        tally.goodput,
    )
    payload[HEADER_BYTES : HEADER_BYTES + len(index)] = index
    payload[HEADER_BYTES + len(index) :] = part.values.reshape(-1).view(np.uint8)
    return payload.data


def decode(payload: bytes | memoryview, shape: UnitShape, partition: int, member: U32 | None) -> Coordinates:
    """Raises BadInput where the message says another thing than it is, or not what was expected. Units are looked at
    where they are used: each has to be of the partition, and there once."""
    if len(payload) < HEADER_BYTES:
        raise BadInput(f"it has {len(payload)} bytes; its header alone has {HEADER_BYTES}")
    said, layouts, choice, width, count, number, had, blocks, goodput = _HEADER.unpack_from(payload)
    if said > Form.DENSE or layouts > (GradientLayout.SPARSE | GradientLayout.DENSE) or not goodput > 0:
        raise BadInput(f"form {said}, layouts {layouts}, goodput {goodput} mean nothing")
    if (width, number) != (shape.width, partition):
        raise BadInput(
            f"it has units of {width} entries, of partition {number}: units of {shape.width} of partition "
            f"{partition} were expected"
        )
    form, most = Form(said), shape.units if member is None else len(member)
    if count > most or (form is not Form.COO and member is None) or (form is Form.DENSE and count != most):
        raise BadInput(f"it says that {count} of at most {most} units are there, as {form.name}")
    index_bytes = _index_bytes(form, count, most)
    expected = HEADER_BYTES + index_bytes + VALUE_BYTES * count * width
    if len(payload) != expected:
        raise BadInput(f"its header says {expected} bytes, and it has {len(payload)}")
    values: F32 = np.frombuffer(payload, "<f4", offset=HEADER_BYTES + index_bytes).reshape(count, width)
    if form is Form.COO:
        unit: U32 = np.frombuffer(payload, "<u4", count, HEADER_BYTES)
    elif form is Form.DENSE or member is None:
        unit = member if member is not None else np.zeros(0, np.uint32)
    else:
        unit = np.empty(count, np.uint32)
        units.bitmap_decode(member, np.frombuffer(payload, np.uint8, index_bytes, HEADER_BYTES), unit)
    return Coordinates(unit, values, SumTally(GradientLayout(layouts), had, blocks, goodput, choice))


def largest(shape: UnitShape) -> int:
    """Bytes that no message of a tensor exceeds."""
    return HEADER_BYTES + shape.units * (INDEX_BYTES + VALUE_BYTES * shape.width) + 1024 * VALUE_BYTES


def _index_bytes(form: Form, count: int, members: int) -> int:
    return {Form.COO: INDEX_BYTES * count, Form.BITMAP: units.bitmap_bytes(members), Form.DENSE: 0}[form]


def _unordered(unit: U32) -> bool:
    return bool((unit[1:] <= unit[:-1]).any())


def finite_or_unknown(goodput_bytes_per_s: float) -> float:
    """As a SumTally has it: what is not measured yet is no bound."""
    return goodput_bytes_per_s if goodput_bytes_per_s > 0 else math.inf
