"""The sum of a group: the same bits on every rank, nothing lost, and no message believed that lies."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import product
from typing import Final

import numpy as np
import pytest
import torch
from algorithms import EVERY, SETTINGS
from group_rig import Ran, run

from atoll.errors import BadInput
from atoll.strategies.compressed.codes.compressors import CodePlace
from atoll.strategies.compressed.exchanges.messages import (
    HEADER_BYTES,
    EntryForm,
    bundled,
    decode,
    encode,
    largest,
    unbundled,
)
from atoll.strategies.compressed.groups.layout import MOST_ENTRIES, TensorLayout
from atoll.strategies.compressed.groups.options import Way

Islands = Sequence[Sequence[int]]
ENTRIES: Final = 5_000
PATHS: Final[dict[str, tuple[Islands, bool]]] = {
    f"{where}, {'divisible' if divisible else 'indivisible'}": (islands, divisible)
    for (where, islands), divisible in product(
        {"one island": [[0, 1, 2]], "islands of two and one": [[0, 1], [2]]}.items(), [False, True]
    )
}
BY_EVERY_PATH: Final = pytest.mark.parametrize(("islands", "divisible"), PATHS.values(), ids=PATHS)


def normal(seed: int, entries: int = ENTRIES, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(entries, generator=torch.Generator().manual_seed(seed))


def same_on_all(ran: Ran) -> torch.Tensor:
    for one in ran.sums[1:]:
        assert torch.equal(one.view(torch.int32), ran.sums[0].view(torch.int32))
    assert ran.counts == [ran.counts[0]] * len(ran.sums)
    return ran.sums[0]


@EVERY
@BY_EVERY_PATH
def test_the_sum_and_what_was_left_out_are_what_came_in(name: str, islands: Islands, divisible: bool) -> None:
    values, before = [normal(rank) for rank in range(3)], [normal(10 + rank) for rank in range(3)]
    ran = run(SETTINGS[name], values, residuals=before, islands=islands, divisible=divisible)
    arrived = same_on_all(ran) + sum(ran.left)
    torch.testing.assert_close(arrived, sum(values) + sum(before), rtol=1e-4, atol=1e-4)
    assert ran.counts[0] == [3.0, 3.0]


@EVERY
@BY_EVERY_PATH
def test_what_is_not_finite_arrives_as_it_is_and_stays_in_no_residual(
    name: str, islands: Islands, divisible: bool
) -> None:
    """Of a leader, of its island's other rank, of one alone in an island: those entries alone are not finite.
    Infinities that cancel are a NaN, as with dense."""
    values, before = [normal(rank) for rank in range(3)], [normal(10 + rank) for rank in range(3)]
    values[0][4_321], values[1][1_024], values[2][9] = np.nan, np.inf, -np.inf
    values[0][7], values[2][7] = np.inf, -np.inf
    ran = run(SETTINGS[name], values, residuals=before, islands=islands, divisible=divisible)
    sum_ = same_on_all(ran)
    np.testing.assert_array_equal(sum_[[4_321, 1_024, 9, 7]], np.float32([np.nan, np.inf, -np.inf, np.nan]))
    assert int((~sum_.isfinite()).sum()) == 4
    for left in ran.left:
        assert left.isfinite().all()


@EVERY
@pytest.mark.parametrize(
    ("islands", "divisible", "size"),
    [(*path, size) for path, size in zip(PATHS.values(), (1e20, 1e38, 1e30, 1e38), strict=True)],
    ids=PATHS,
)
def test_gradients_near_the_end_of_float32_are_summed_and_leave_residuals_finite(
    name: str, islands: Islands, divisible: bool, size: float
) -> None:
    """Sums of squares and of magnitudes would overflow: what is that large goes whole."""
    values = [normal(rank, scale=0.3).clamp(-1, 1) * size for rank in range(3)]
    residuals = [normal(10 + rank, scale=0.3).clamp(-1, 1) for rank in range(3)]
    ran = run(SETTINGS[name], values, residuals=residuals, islands=islands, divisible=divisible)
    torch.testing.assert_close(same_on_all(ran), sum(values), rtol=1e-5, atol=1e-5 * size)
    for left in ran.left:
        assert left.abs().max() < 10


@BY_EVERY_PATH
def test_a_gradient_that_is_all_beyond_the_threshold_in_one_step_goes_as_a_whole(
    islands: Islands, divisible: bool
) -> None:
    """1. Hardly anything is beyond it. 2. Everything is: all of it arrives, in messages that mailboxes take."""
    few = run(SETTINGS["threshold"], [normal(rank, scale=0.3) for rank in range(3)], islands=islands)
    values = [2 + normal(rank).abs() for rank in range(3)]
    ran = run(SETTINGS["threshold"], values, residuals=few.left, islands=islands, divisible=divisible)
    torch.testing.assert_close(same_on_all(ran) + sum(ran.left), sum(values) + sum(few.left), rtol=1e-5, atol=1e-5)
    assert max(float(left.abs().max()) for left in ran.left) <= 1.0
    assert 0 < ran.longest <= largest(3, ENTRIES, 2)


@EVERY
@BY_EVERY_PATH
def test_groups_of_few_entries_of_none_and_of_zeros(name: str, islands: Islands, divisible: bool) -> None:
    for entries in (0, 1, 2, 1_025):
        values = [normal(rank, entries) for rank in range(3)]
        ran = run(SETTINGS[name], values, islands=islands, divisible=divisible)
        torch.testing.assert_close(same_on_all(ran) + sum(ran.left), sum(values), rtol=1e-4, atol=1e-4)
        assert ran.counts[0] == [3.0, 3.0]
        assert ran.longest <= largest(3, entries, 2)
    ran = run(SETTINGS[name], [torch.zeros(ENTRIES)] * 3, islands=islands, divisible=divisible)
    assert not same_on_all(ran).any()
    assert not any(left.any() for left in ran.left)


# --- messages that lie

FIELDS: Final = struct.Struct("<BxxxIQQ")


def changed(message: memoryview, **said: int) -> bytes:
    fields = dict(zip(("form", "counts", "first", "entries"), FIELDS.unpack_from(message), strict=True)) | said
    return FIELDS.pack(*fields.values()) + bytes(message[HEADER_BYTES:])


def another_range(message: memoryview) -> bytes:
    return changed(message, first=FIELDS.unpack_from(message)[2] + 1_024)


LIES: Final[dict[str, tuple[Callable[[memoryview], bytes], str]]] = {
    "nothing": (lambda m: b"", "it has 0 bytes; its header alone has 24"),
    "short": (lambda m: bytes(m[: HEADER_BYTES - 1]), "it has 23 bytes; its header alone has 24"),
    "no counts": (lambda m: bytes(m[:HEADER_BYTES]), "its header says 2 counts, and it has 24 bytes"),
    "cut": (lambda m: bytes(m[:-3]), "bytes of compressed entries, and .* were expected"),
    "more than it says": (lambda m: bytes(m) + bytes(8), "bytes of compressed entries, and .* were expected"),
    "another form": (lambda m: changed(m, form=2), "form 2 means nothing"),
    "more counts": (lambda m: changed(m, counts=2**32 - 1), "4294967295 counts: .* were expected"),
    "a range that is not its own": (another_range, "entries from .* were expected"),
    "more entries": (lambda m: changed(m, entries=2**63), "it has 9223372036854775808 entries"),
    "fewer entries": (lambda m: changed(m, entries=1), "it has 1 entries"),
}


@pytest.mark.parametrize(("name", "stage"), [(name, number % 4) for number, name in enumerate(LIES)])
def test_a_message_that_lies_is_refused_and_its_sender_named(name: str, stage: int) -> None:
    """To its island's leader, between leaders in both stages of a divisible exchange, and back into the island. Leader
    0 has all counts of the second stage."""
    lie, says = LIES[name]
    liar = {0: 1, 1: 2, 2: 0, 3: 0}[stage]

    def change(rank: int, to: int, at: int, message: memoryview) -> bytes | memoryview:
        if (rank, at) != (liar, stage):
            return message
        if stage < 3:
            return lie(message)
        first, *rest = unbundled(message, 2)
        return bundled([lie(first), *rest])

    with pytest.raises(BadInput, match=f"rank {liar} sent a message that cannot be: .*{says}"):
        run(
            SETTINGS["float16"],
            [normal(rank) for rank in range(3)],
            islands=[[0, 1], [2]],
            divisible=True,
            change=change,
        )


@pytest.mark.parametrize(("index", "divisible"), [(ENTRIES, False), (2**31, True), (2**32 - 1, False)])
def test_an_index_outside_the_group_is_refused_and_its_sender_named(index: int, divisible: bool) -> None:
    def change(rank: int, to: int, stage: int, message: memoryview) -> bytes | memoryview:
        if (rank, to) != (1, 0):
            return message
        wrong = bytearray(message)
        (there,) = struct.unpack_from("<I", wrong, HEADER_BYTES + 8)
        struct.pack_into("<I", wrong, HEADER_BYTES + 8 + 4 * there, index)
        return bytes(wrong)

    with pytest.raises(BadInput, match="rank 1 sent .* indices do not ascend, or reach beyond the last"):
        run(SETTINGS["dgc"], [normal(rank) for rank in range(2)], divisible=divisible, change=change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m[:5], "3 messages were expected in it, and 0 are there"),
        (lambda m: m + b"x", "1 bytes more than its 3 messages"),
        (lambda m: struct.pack("<Q", 2**63) + m[8:], "a message in it has 9223372036854775808 bytes, and 32 are left"),
        (lambda m: m[:16], "3 messages were expected in it, and 1 are there"),
    ],
)
def test_a_bundle_that_lies_is_refused(change: Callable[[bytes], bytes], says: str) -> None:
    whole = bytes(bundled([b"12345678", b"", b"x" * 8]))
    with pytest.raises(BadInput, match=says):
        unbundled(change(whole), 3)
    assert [bytes(one) for one in unbundled(whole, 3)] == [b"12345678", b"", b"x" * 8]


# --- large models


def test_entries_beyond_2_32_are_addressed_and_a_table_of_2_31_goes_whole() -> None:
    """1. A table of 2^31 entries lies before a small tensor. 2. It is too large for a message: it is not compressed,
    whatever a plan says. 3. The small one is, and its messages say where it begins. Nothing of it is allocated."""
    kind = (torch.float32, torch.device("cpu"))
    table = 2**31 + 4
    layout = TensorLayout(
        ("head", "table", "last", "end"),
        ((9,), (2**29 + 1, 4), (100,), (50,)),
        (kind,) * 4,
        (0, 9, 9 + table, 109 + table, 159 + table),
    )
    compressed = Way(compressed=True)
    groups = layout.by_size(0, compressed)
    assert [(one.begin, one.end, one.way.compressed) for one in groups] == [(0, 1, True), (1, 2, False), (2, 4, True)]
    assert layout.size(1, 2) > MOST_ENTRIES
    place = CodePlace(1, 2 * layout.first[2], ((100,),))
    assert place.first > 2**32
    message = encode(EntryForm.WHOLE, place, 100, np.zeros(2, np.float32), np.zeros(400, np.uint8))
    assert len(decode(message, place, 100, 2).payload) == 400
    with pytest.raises(BadInput, match=f"from {place.first} on"):
        decode(message, CodePlace(1, place.first - 2**32, ((100,),)), 100, 2)
