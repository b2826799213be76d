"""Hierarchical hashing, the hash bitmap and sums in coordinate form: nothing is lost, and partitions are balanced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import native_parts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.kernels import _native, units
from atoll.kernels.units import PartitionsOf

U32 = NDArray[np.uint32]
SEEDS = (0x9747B28C, 17, 2**32 - 1, 0)
SIZES = [0, 1, 2, 31, 32, 33, 1023, 1025, 2**16 + 1]


def hashed(unit: U32, partitions: int, seeds: tuple[int, ...] = SEEDS, threads: int = 0) -> list[U32]:
    """The units of each partition."""
    order = np.zeros(len(unit), np.uint32)
    bounds, _ = units.hierarchical_hash(unit, seeds, partitions, order, threads)
    assert bounds[0] == 0
    assert bounds[-1] == len(unit)
    return [unit[order[begin:end]] for begin, end in pairwise(bounds)]


def murmur3(keys: U32, seed: int) -> U32:
    out = np.zeros_like(keys)
    native_parts.load().murmur3(keys, seed, out)
    return out


@pytest.mark.parametrize(
    ("key", "seed", "hashed_to"),
    [
        (b"\x00\x00\x00\x00", 0, 0x2362F9DE),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"\x21\x43\x65\x87", 0, 0xF55B516B),
        (b"\x21\x43\x65\x87", 0x5082EDEE, 0x2362F9DE),
        (b"test", 0, 0xBA6BD213),
        (b"test", 0x9747B28C, 0x704B81DC),
    ],
)
def test_the_hash_is_murmurhash3_as_published(key: bytes, seed: int, hashed_to: int) -> None:
    """Vectors of MurmurHash3_x86_32 for keys of four bytes, from its public test suites."""
    assert murmur3(np.frombuffer(key, "<u4"), seed)[0] == hashed_to


@pytest.mark.parametrize(("partitions", "threads"), [(1, 2), (2, 1), (3, 7), (16, 2)])
@pytest.mark.parametrize("count", SIZES)
def test_every_unit_is_in_exactly_one_partition(count: int, partitions: int, threads: int) -> None:
    unit = np.random.default_rng(count).permutation(np.arange(3 * count, dtype=np.uint32))[:count]
    parts = hashed(unit, partitions, threads=threads)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(unit))


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 2**32 - 1), max_size=400),
    st.integers(1, 40),
    st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
    st.integers(1, 300),
)
def test_nothing_is_ever_lost_however_small_the_memory(
    chosen: set[int], partitions: int, seeds: tuple[int, ...], slots: int
) -> None:
    """With one slot a partition nearly all units collide: the serial memory grows past its room, and drops nothing."""
    unit = np.array(sorted(chosen), np.uint32)
    order = np.zeros(len(unit), np.uint32)
    bounds, serial = _native.hierarchical_hash(unit, seeds, partitions, order, slots, 2)
    assert sorted(order) == list(range(len(unit)))
    assert serial >= len(unit) - partitions * slots
    parts = [set(unit[order[a:b]].tolist()) for a, b in pairwise(bounds)]
    expected = murmur3(unit, seeds[0]).astype(np.uint64) * partitions >> np.uint64(32)
    assert parts == [set(unit[expected == p].tolist()) for p in range(partitions)]


def test_the_same_unit_is_of_the_same_partition_on_every_rank() -> None:
    """Ranks have different units, in different orders: a unit that two have goes to one partition."""
    rng = np.random.default_rng(5)
    ranks = [rng.choice(np.arange(5000, dtype=np.uint32), 2000, replace=False) for _ in range(4)]
    home: dict[int, int] = {}
    for rank in ranks:
        for p, part in enumerate(hashed(rank, 4)):
            for one in part.tolist():
                assert home.setdefault(one, p) == p
    members = np.zeros(5000, np.uint32)
    bounds = units.partition_members(SEEDS[0], 4, members)
    for p in range(4):
        mine = members[bounds[p] : bounds[p + 1]]
        assert (np.diff(mine.astype(np.int64)) > 0).all()
        assert {one for one, at in home.items() if at == p} <= set(mine.tolist())


ADVERSARIAL: dict[str, Callable[[int], U32]] = {
    "one range": lambda n: np.arange(10**9, 10**9 + 200_000, dtype=np.uint32),
    "the beginning": lambda n: np.arange(200_000, dtype=np.uint32),
    "strides of the partitions": lambda n: (np.arange(200_000, dtype=np.uint64) * n).astype(np.uint32),
    "strides of a power of two": lambda n: (np.arange(200_000, dtype=np.uint64) * 4096).astype(np.uint32),
    "strides of 16": lambda n: (np.arange(200_000, dtype=np.uint64) * 16).astype(np.uint32),
    "sums of two powers of two and a little": lambda n: np.unique(
        np.add.outer(np.add.outer(2 ** np.arange(8, 31), 2 ** np.arange(8, 31)), np.arange(400)).ravel()
    ).astype(np.uint32),
}


@pytest.mark.parametrize(
    ("name", "partitions"),
    [*product(ADVERSARIAL, (3, 16)), *(("strides of the partitions", n) for n in (2, 4, 8))],
)
def test_partitions_are_balanced_for_adversarial_units(name: str, partitions: int) -> None:
    """Imbalance is the largest partition over the mean (Definition 3.6). An even split of the range puts all of the
    first two into one partition."""
    unit = ADVERSARIAL[name](partitions)
    sizes = [len(part) for part in hashed(unit, partitions)]
    assert max(sizes) * partitions / len(unit) < 1.1


def test_few_units_find_no_slot() -> None:
    """With 2 |I| slots and three tries the published algorithm leaves a few per cent to the serial memory."""
    unit = np.arange(0, 600_000, 3, dtype=np.uint32)
    for partitions in (2, 16):
        _, serial = units.hierarchical_hash(unit, SEEDS, partitions, np.zeros(len(unit), np.uint32))
        assert 0 < serial < 0.04 * len(unit)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("count", SIZES)
def test_a_bitmap_says_which_members_are_there(count: int, partitions: int) -> None:
    rng = np.random.default_rng(count)
    member = np.zeros(count, np.uint32)
    bounds = units.partition_members(SEEDS[0], partitions, member)
    assert sorted(member) == list(range(count))
    total = 0
    for p in range(partitions):
        mine = member[bounds[p] : bounds[p + 1]]
        there = mine[rng.random(len(mine)) < 0.3]
        bitmap = np.full(units.bitmap_bytes(len(mine)), 255, np.uint8)
        units.bitmap_encode(mine, there, bitmap)
        expected = np.packbits(np.isin(mine, there), bitorder="little")
        assert (bitmap == expected).all()
        again = np.zeros(len(there), np.uint32)
        units.bitmap_decode(mine, bitmap, again)
        assert (again == there).all()
        total += len(bitmap)
    assert total <= count / 8 + partitions  # Theorem 3.3: one bit a unit, however many partitions


def test_units_of_a_table_beyond_2_31_rows_have_their_bits() -> None:
    """They ascend as unsigned numbers. Of such a table a few rows are members here; nothing lists the others."""
    member = np.array([0, 5, 2**31 - 1, 2**31, 2**31 + 7, 2**32 - 2, 2**32 - 1], np.uint32)
    there = member[[1, 3, 4, 6]]
    bitmap = np.zeros(1, np.uint8)
    units.bitmap_encode(member, there, bitmap)
    assert bitmap.item() == 0b1011010
    again = np.zeros(4, np.uint32)
    units.bitmap_decode(member, bitmap, again)
    assert (again == there).all()


def test_a_bitmap_that_lies_is_refused() -> None:
    member = np.arange(0, 26, 2, dtype=np.uint32)
    room = np.zeros(2, np.uint8)
    for unit in ([3], [4, 2], [2, 2], [24, 26]):
        with pytest.raises(BadInput, match="does not ascend, or has one that is no member"):
            units.bitmap_encode(member, np.array(unit, np.uint32), room)
    with pytest.raises(BadInput, match="bitmap has 1 entries, not 2"):
        units.bitmap_encode(member, np.array([2], np.uint32), room[:1])
    for bits, count in (([1, 0], 2), ([3, 0], 1), ([0, 32], 1)):
        with pytest.raises(BadInput, match=f"bitmap has not {count} bits set"):
            units.bitmap_decode(member, np.array(bits, np.uint8), np.zeros(count, np.uint32))


def in_order(terms: list[tuple[U32, NDArray[np.float32]]], width: int) -> dict[int, NDArray[np.float32]]:
    """The slow twin: sums in the terms' order, one unit after the other."""
    sums: dict[int, NDArray[np.float32]] = {}
    for unit, values in terms:
        for one, row in zip(unit.tolist(), values.reshape(-1, width), strict=True):
            sums[one] = sums[one] + row if one in sums else row
    return sums


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 33])
@pytest.mark.parametrize("count", [0, 1, 33, 1025])
def test_sums_have_the_bits_of_the_same_sums_one_by_one(count: int, width: int, threads: int) -> None:
    rng = np.random.default_rng(width)
    terms = []
    for rank in range(4):
        unit = rng.choice(np.arange(2 * count + 1, dtype=np.uint32), count, replace=False)
        values = rng.standard_normal((count, width)).astype(np.float32) * np.float32(10.0**rank)
        terms.append((unit, values))
    if count > 1:
        terms[0][1][0] = np.inf
        terms[1][1][1] = np.nan
        terms[2][1][-1] = -0.0
    unit, values = units.sum_coordinates(terms, 2 * count + 1, width, threads=threads)
    expected = in_order(terms, width)
    assert unit.tolist() == sorted(expected)
    assert values.shape == (len(unit), width)
    for one, row in zip(unit.tolist(), values, strict=True):
        np.testing.assert_array_equal(row, expected[one])


def test_a_wide_sum_has_the_same_bits_for_every_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    terms = [
        (rng.permutation(np.arange(9000, dtype=np.uint32))[:6000], rng.standard_normal((6000, 128)).astype(np.float32))
        for _ in range(3)
    ]
    expected = in_order(terms, 128)
    for threads in (1, 2, 5):
        unit, values = units.sum_coordinates(terms, 9000, 128, threads=threads)
        assert values.tobytes() == np.stack([expected[one] for one in unit.tolist()]).tobytes()


def test_units_that_may_not_be_there_are_refused_by_name() -> None:
    own = np.arange(100, dtype=np.uint32)
    mine = own[murmur3(own, 7).astype(np.uint64) * 2 >> np.uint64(32) == 1]
    other = np.setdiff1d(own, mine)
    ones = np.ones(1, np.float32)

    def refused(unit: int, says: str) -> None:
        term = (np.array([*mine[:3], unit], np.uint32), np.ones(4, np.float32))
        with pytest.raises(BadInput, match=says):
            units.sum_coordinates([(mine[:1], ones), term], 100, 1, PartitionsOf(7, 2, (1, 1)))

    refused(100, r"terms\[1\] has unit 100, beyond the last of 100")
    refused(2**32 - 1, "has unit 4294967295, beyond the last of 100")
    refused(int(other[0]), f"has unit {other[0]}, which is not of partition 1")
    refused(int(mine[1]), f"has unit {mine[1]} twice")
    with pytest.raises(BadInput, match=r"terms\[0\] has 3 entries, not 2"):
        units.sum_coordinates([(mine[:2], np.ones(3, np.float32))], 100, 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_units_that_are_not_zero_are_found(threads: int) -> None:
    rng = np.random.default_rng(1)
    dense = np.zeros((70_000, 8), np.float32)
    there = np.sort(rng.choice(70_000, 900, replace=False))
    dense[there, rng.integers(0, 8, 900)] = np.nan
    dense[np.setdiff1d(np.arange(70_000), there)[:50]] = -0.0
    assert units.nonzero_units(dense, 8, threads).tolist() == there.tolist()
    assert units.nonzero_units(np.zeros((0, 8), np.float32), 8).tolist() == []
    with pytest.raises(BadInput, match="no number of units of 3"):
        units.nonzero_units(np.zeros(8, np.float32), 3)


def test_units_of_a_table_with_more_than_2_31_entries_are_addressed() -> None:
    """2^26 rows of 64 entries: 2^32 in all, of which three are there."""
    unit = np.array([0, 2**25 + 1, 2**26 - 1], np.uint32)
    values = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    found, sums = units.sum_coordinates([(unit, values), (unit[2:], values[:1])], 2**26, 64)
    assert found.tolist() == unit.tolist()
    assert (sums == values + np.array([[0], [0], [1]], np.float32) * values[0]).all()


@pytest.mark.parametrize("width", [1, 2, 7, 64])
@pytest.mark.parametrize(("count", "values"), [(0, 1), (1, 1), (33, 5), (1025, 800), (5000, 900)])
def test_rows_of_the_same_bits_are_found(count: int, values: int, width: int) -> None:
    """0.0 and -0.0 are two, and a NaN is one with itself."""
    rng = np.random.default_rng(count)
    several = rng.standard_normal((values, width)).astype(np.float32)
    several[:3, -1] = np.array([0.0, -0.0, np.nan], np.float32)[: len(several)]
    rows = several[rng.integers(0, values, count)]
    found = units.distinct_rows(rows)
    assert rows[found.first][found.reference].tobytes() == rows.tobytes()
    assert len(found.first) == len({row.tobytes() for row in rows})
    assert (np.diff(found.first.astype(np.int64)) > 0).all()


def test_rows_that_hardly_repeat_at_first_are_not_looked_at_further() -> None:
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.standard_normal((1024, 4)), np.zeros((5000, 4))]).astype(np.float32)
    found = units.distinct_rows(rows)
    assert found.first.tolist() == found.reference.tolist() == list(range(6024))


def test_rows_that_do_not_fit_are_refused() -> None:
    reference, first = np.zeros(3, np.uint32), np.zeros(3, np.uint32)
    with pytest.raises(ValueError, match="values has 8 entries, not 6"):
        _native.distinct_rows(np.zeros((4, 2), np.float32), 2, reference, first)
    with pytest.raises(ValueError, match="width = 0"):
        _native.distinct_rows(np.zeros((4, 2), np.float32), 0, reference, first)
    with pytest.raises(ValueError, match="reference and first share memory"):
        _native.distinct_rows(np.zeros((3, 2), np.float32), 2, reference, reference)
