"""Encode and decode a message between two ranks: coordinates of one partition of a tensor, in the shortest form.

A header, then the indices, then float32 values, little-endian. If values of many units have the same bits, as in the
gradient of a bag of embeddings, each is sent once, behind a reference for each unit. The receiver checks all fields of
a message before it uses them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.kernels import units
from atoll.strategies.zen.coordinates import F32, U32, Coordinates, GradientLayout, SumTally, UnitShape, summed

INDEX_BYTES: Final = 4
VALUE_BYTES: Final = 4

# form, layouts, choice; entries of a unit, units, partition, distinct values; units, blocks and distinct values that
# ranks had, goodput
_HEADER: Final = struct.Struct("<BBBxIIIIQQQd")
HEADER_BYTES: Final = _HEADER.size


Members: TypeAlias = Callable[[int], U32]
"""Function that lists all units of a partition, ascending."""


class Form(IntEnum):
    """Form of the indices. DENSE: every member of the partition is there, so none are sent."""

    COO = 0
    BITMAP = 1
    DENSE = 2


def encode(part: Coordinates, shape: UnitShape, partition: int, member: U32 | None, *, once: bool = True) -> memoryview:
    """Encode coordinates. member: all units of the partition, ascending, if both ends know them; the form is then the
    shortest, with Zen's hash bitmap. None: COO. once: send repeated values once."""
    count, width = part.values.shape
    form = Form.COO
    if member is not None and bitmap_pays(count, len(member)):
        part = summed([part], shape) if _unordered(part.unit) else part
        form = Form.DENSE if count == len(member) else Form.BITMAP
    reference, values = _repeated(part.values) if once else (np.zeros(0, np.uint32), part.values)
    index_bytes = _index_bytes(form, count, 0 if member is None else len(member))
    payload = np.empty(HEADER_BYTES + index_bytes + reference.nbytes + values.nbytes, np.uint8)
    tally = part.tally
    _HEADER.pack_into(
        payload.data,
        0,
        form,
        tally.layouts,
        tally.choice,
        width,
        count,
        partition,
        len(values),
        tally.units,
        tally.blocks,
        tally.distinct,
        tally.goodput,
    )
    index, behind = payload[HEADER_BYTES : HEADER_BYTES + index_bytes], payload[HEADER_BYTES + index_bytes :]
    if form is Form.BITMAP:
        units.bitmap_encode(member, part.unit, index)
    elif form is Form.COO:
        index[:] = part.unit.view(np.uint8)
    behind[: reference.nbytes] = reference.view(np.uint8)
    behind[reference.nbytes :] = values.reshape(-1).view(np.uint8)
    return payload.data


def bitmap_pays(count: int, members: float) -> bool:
    """Return whether a bitmap of so many members is shorter than the indices of so many units."""
    return members < 8 * INDEX_BYTES * count


def decode(payload: bytes | memoryview, shape: UnitShape, partition: int, members: Members | None) -> Coordinates:
    """Decode a message.

    members: lists the units that a message with a bitmap needs; None: bitmaps are refused. Raises BadInput if the
    message contradicts itself or is not the expected one. The sum checks that each unit is of the partition, and there
    once."""
    if len(payload) < HEADER_BYTES:
        raise BadInput(f"it has {len(payload)} bytes; its header alone has {HEADER_BYTES}")
    said, layouts, choice, width, count, number, distinct, had, blocks, rows, goodput = _HEADER.unpack_from(payload)
    if said > Form.DENSE or layouts > (GradientLayout.SPARSE | GradientLayout.DENSE) or not goodput > 0:
        raise BadInput(f"form {said}, layouts {layouts}, goodput {goodput} mean nothing")
    if (width, number) != (shape.width, partition):
        raise BadInput(
            f"it has units of {width} entries, of partition {number}: units of {shape.width} of partition "
            f"{partition} were expected"
        )
    form = Form(said)
    member = None if members is None or form is Form.COO else members(partition)
    most = shape.units if member is None else len(member)
    if count > most or (form is not Form.COO and member is None) or (form is Form.DENSE and count != most):
        raise BadInput(f"it says that {count} of at most {most} units are there, as {form.name}")
    if distinct > count or (distinct == 0) != (count == 0):
        raise BadInput(f"it says that the values of {count} units are {distinct} distinct ones")
    index_bytes, of_reference = _index_bytes(form, count, most), _reference_dtype(distinct)
    reference_bytes = of_reference.itemsize * count if distinct < count else 0
    expected = HEADER_BYTES + index_bytes + reference_bytes + VALUE_BYTES * distinct * width
    if len(payload) != expected:
        raise BadInput(f"its header says {expected} bytes, and it has {len(payload)}")
    behind = HEADER_BYTES + index_bytes
    values: F32 = np.frombuffer(payload, "<f4", offset=behind + reference_bytes).reshape(distinct, width)
    if distinct < count:
        reference = np.frombuffer(payload, of_reference, count, behind)
        if int(reference.max()) >= distinct:
            raise BadInput(f"a unit has value {int(reference.max())} of {distinct}, counted from 0")
        values = values[reference]
    if form is Form.COO:
        unit: U32 = np.frombuffer(payload, "<u4", count, HEADER_BYTES)
    elif form is Form.DENSE or member is None:
        unit = member if member is not None else np.zeros(0, np.uint32)
    else:
        unit = np.empty(count, np.uint32)
        units.bitmap_decode(member, np.frombuffer(payload, np.uint8, index_bytes, HEADER_BYTES), unit)
    return Coordinates(unit, values, SumTally(GradientLayout(layouts), had, blocks, rows, goodput, choice))


def largest(shape: UnitShape) -> int:
    """Return an upper bound of the bytes of a tensor's message."""
    return HEADER_BYTES + shape.units * (INDEX_BYTES + VALUE_BYTES * shape.width) + 1024 * VALUE_BYTES


def _repeated(values_KW: F32) -> tuple[NDArray[np.unsignedinteger[Any]], F32]:
    """Return for each unit the place of its value, and the distinct values; no places if that saves no bytes."""
    count, width = values_KW.shape
    if width > 1:
        rows = units.distinct_rows(values_KW)
        of_reference = _reference_dtype(len(rows.first))
        if of_reference.itemsize * count + VALUE_BYTES * width * len(rows.first) < VALUE_BYTES * width * count:
            return rows.reference.astype(of_reference), values_KW[rows.first]
    return np.zeros(0, np.uint32), values_KW


def _reference_dtype(distinct: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype("<u2") if distinct <= 1 << 16 else np.dtype("<u4")


def _index_bytes(form: Form, count: int, members: int) -> int:
    return {Form.COO: INDEX_BYTES * count, Form.BITMAP: units.bitmap_bytes(members), Form.DENSE: 0}[form]


def _unordered(unit: U32) -> bool:
    return bool((unit[1:] <= unit[:-1]).any())
