"""Hierarchical hashing and the hash bitmap on the CPU, on a CUDA device, and with the device's code on the CPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels_of import Kernels

from atoll.errors import BadInput
from atoll.kernels import _native, units

SEEDS = (0x9747B28C, 17, 2**32 - 1, 0)
CPU = Kernels(_native, "cpu", ())


def chosen(count: int, below: int, seed: int = 0) -> torch.Tensor:
    unit = np.sort(np.random.default_rng(seed).choice(below, count, replace=False))
    return torch.from_numpy(unit.astype(np.int32))


def parts(unit: torch.Tensor, bounds: list[int], order: torch.Tensor) -> list[list[int]]:
    placed = unit.cpu()[order.cpu().long()].numpy().view(np.uint32)
    return [sorted(placed[begin:end].tolist()) for begin, end in pairwise(bounds)]


@pytest.mark.parametrize(
    ("count", "partitions"), [(0, 3), (1, 16), (31, 1), (33, 257), (1025, 3), (1025, 1), (2**14 + 1, 16)]
)
@pytest.mark.usefixtures("everywhere")
def test_every_unit_is_in_the_partition_that_its_hash_says(count: int, partitions: int, device: str) -> None:
    """Once, and the same as on the CPU, whatever order the threads come in."""
    unit = chosen(count, 3 * count + 1)
    here = torch.zeros(count, dtype=torch.int32, device="cpu")
    expected, _ = _native.hierarchical_hash(unit, SEEDS, partitions, here, 0, 1)
    order = torch.zeros(count, dtype=torch.int32)
    bounds, serial = units.hierarchical_hash(unit.to(device), SEEDS, partitions, order)
    assert bounds == expected
    assert sorted(order.tolist()) == list(range(count))
    assert parts(unit, bounds, order) == parts(unit, expected, here)
    assert serial <= count


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    chosen_=st.sets(st.integers(0, 2**32 - 1), max_size=300),
    partitions=st.integers(1, 40),
    seeds=st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
    slots=st.integers(1, 3000),
)
def test_a_device_loses_nothing_however_small_the_memory(
    twin: Kernels, chosen_: set[int], partitions: int, seeds: tuple[int, ...], slots: int
) -> None:
    """With one slot a partition nearly all threads write into the same, and read another's place back."""
    unit = torch.from_numpy(np.array(sorted(chosen_), np.uint32).view(np.int32))
    here, there = torch.zeros(len(unit), dtype=torch.int32), torch.zeros(len(unit), dtype=torch.int32)
    there = there.to(twin.device)
    expected, _ = _native.hierarchical_hash(unit, seeds, partitions, here, slots, 1)
    bounds, serial = twin.call("hierarchical_hash", unit.to(twin.device), seeds, partitions, there, slots)
    assert bounds == expected
    assert sorted(there.tolist()) == list(range(len(unit)))
    assert parts(unit, bounds, there) == parts(unit, expected, here)
    assert serial >= len(unit) - partitions * slots


@pytest.mark.parametrize(
    ("members", "share"),
    [(1, 0.0), (1, 1.0), (7, 0.5), (8, 1.0), (9, 0.03), (9, 1.0), (1023, 0.5), (8193, 0.03), (2**14 + 5, 0.5)],
)
@pytest.mark.usefixtures("everywhere")
def test_a_bitmap_has_the_cpus_bits_and_comes_back(members: int, share: float, device: str) -> None:
    member = chosen(members, 3 * members, 1)
    unit = member[chosen(round(share * members), members, 2).long()]
    expected = torch.full((units.bitmap_bytes(members),), 255, dtype=torch.uint8, device="cpu")
    _native.bitmap_encode(member, unit, expected)
    bitmap = torch.full((units.bitmap_bytes(members),), 255, dtype=torch.uint8)
    units.bitmap_encode(member.to(device), unit.to(device), bitmap)
    assert bitmap.cpu().equal(expected)
    again = torch.zeros(len(unit), dtype=torch.int32)
    units.bitmap_decode(member.to(device), bitmap, again)
    assert again.cpu().equal(unit)


@pytest.mark.usefixtures("everywhere")
def test_units_of_a_table_beyond_2_31_rows_have_their_bits(device: str) -> None:
    """They ascend as unsigned numbers. Of such a table a few rows are members here; nothing lists the others."""
    rows = np.array([0, 5, 2**31 - 1, 2**31, 2**31 + 7, 2**32 - 2, 2**32 - 1], np.uint32)
    member = torch.from_numpy(rows.view(np.int32)).to(device)
    unit = member[[1, 3, 4, 6]]
    bitmap = torch.zeros(1, dtype=torch.uint8)
    units.bitmap_encode(member, unit, bitmap)
    assert bitmap.item() == 0b1011010
    again = torch.zeros(4, dtype=torch.int32)
    units.bitmap_decode(member, bitmap, again)
    assert again.cpu().equal(unit.cpu())


@pytest.mark.usefixtures("everywhere")
def test_what_is_no_set_of_members_is_refused() -> None:
    member = torch.arange(0, 60, 2, dtype=torch.int32)
    bitmap = torch.zeros(4, dtype=torch.uint8)
    for wrong in ([1], [2, 2], [4, 2], [2, 60]):
        with pytest.raises(BadInput, match="unit does not ascend, or has one that is no member"):
            units.bitmap_encode(member, torch.tensor(wrong, dtype=torch.int32), bitmap)
    unit = torch.full((3,), 9, dtype=torch.int32)
    for bits in ([3, 0, 0, 0], [255, 0, 0, 0], [1, 1, 0, 128]):
        with pytest.raises(BadInput, match="bitmap has not 3 bits set, or has one beyond the last member"):
            units.bitmap_decode(member, torch.tensor(bits, dtype=torch.uint8), unit)
    assert unit.eq(9).all()
    with pytest.raises(BadInput, match="it must have one bit for each member"):
        units.bitmap_decode(member, bitmap[:3], unit)
    with pytest.raises(BadInput, match="partitions = 0"):
        units.hierarchical_hash(member, SEEDS, 0, torch.zeros_like(member))
