from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels_of import Kernels

from atoll.errors import BadInput
from atoll.kernels import _native
from atoll.kernels.signs import SIGN_BLOCK, sign_add, sign_blocks, sign_bytes, sign_encode

SIZES = [0, 1, 31, 32, 33, 1023, 1024, 1025, 2**18 + 3]
SIDES = pytest.mark.parametrize("two_sided", [False, True], ids=["one mean", "two means"])


def normal(entries: int, seed: int = 1) -> torch.Tensor:
    values = torch.randn(entries, generator=torch.Generator().manual_seed(seed))
    values[::7] = 0
    values[3::11] = -0.0
    return values


def code(entries: int, *, two_sided: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.empty(sign_blocks(entries), 2) if two_sided else torch.empty(sign_blocks(entries))
    return torch.empty(sign_bytes(entries), dtype=torch.uint8), scales


def slow(values: torch.Tensor, *, two_sided: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What the code stands for, in NumPy and float64; and the bits."""
    given = values.numpy().astype(np.float64)
    decoded = np.empty_like(given)
    for begin in range(0, len(given), SIGN_BLOCK):
        one = given[begin : begin + SIGN_BLOCK]
        below = one < 0
        means = [np.abs(one[part]).mean() if part.any() else 0.0 for part in (~below, below)]
        if not two_sided:
            means = [np.abs(one).mean()] * 2
        decoded[begin : begin + SIGN_BLOCK] = np.where(below, -means[1], means[0])
    bits = np.packbits(given < 0, bitorder="little")
    return torch.from_numpy(decoded.astype(np.float32)), torch.from_numpy(bits)


@SIDES
@pytest.mark.parametrize("entries", SIZES)
def test_it_is_what_numpy_says(entries: int, two_sided: bool) -> None:
    values = normal(entries)
    left, (bits, scales) = values.clone(), code(entries, two_sided=two_sided)
    sign_encode(left, bits, scales, two_sided=two_sided)
    decoded = torch.zeros(entries)
    sign_add(bits, scales, decoded, two_sided=two_sided)
    expected, expected_bits = slow(values, two_sided=two_sided)
    assert torch.equal(bits, expected_bits)
    torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=0)
    assert torch.equal(left, values - decoded)


@SIDES
@pytest.mark.parametrize("entries", SIZES)
def test_bits_are_the_same_for_every_number_of_threads_and_on_every_processor(entries: int, two_sided: bool) -> None:
    found = set()
    for threads, portable in ((1, False), (1, True), (3, False), (5, True)):
        left, (bits, scales) = normal(entries), code(entries, two_sided=two_sided)
        _native.sign_encode(left, bits, scales, two_sided, threads, portable=portable)
        out = normal(entries, seed=2)
        _native.sign_add(bits, scales, out, two_sided, threads, portable=portable)
        found.add(b"".join(one.numpy().tobytes() for one in (left, bits, scales, out)))
    assert len(found) == 1


@SIDES
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("entries", [1, 33, 1024, 1025, 2**17 + 3])
def test_a_gpu_has_the_cpus_bits(twin: Kernels, entries: int, shift: int, two_sided: bool) -> None:
    """shift: entries and bytes into their memory at which the buffers begin. No byte beyond the last is written."""
    results = []
    for where in (Kernels(_native, "cpu", ()), twin):
        left, out = (normal(entries + shift, seed).to(where.device)[shift:] for seed in (1, 2))
        room = torch.full((shift + sign_bytes(entries) + 5,), 170, dtype=torch.uint8, device=where.device)
        bits, scales = room[shift:-5], code(entries, two_sided=two_sided)[1].to(where.device)
        where.call("sign_encode", left, bits, scales, two_sided)
        where.call("sign_add", bits, scales, out, two_sided)
        results.append([one.cpu().numpy().tobytes() for one in (left, room, scales, out)])
    assert results[0] == results[1]


@SIDES
def test_what_does_not_fit_is_refused_and_changes_nothing(two_sided: bool) -> None:
    values = normal(1025)
    bits, scales = code(1025, two_sided=two_sided)
    for wrong in ((bits[:-1], scales), (bits, scales[:-1]), (bits.to(torch.int32), scales), (None, scales)):
        before = values.clone()
        with pytest.raises(BadInput):
            sign_encode(values, *wrong, two_sided=two_sided)
        assert torch.equal(values, before)
    with pytest.raises(BadInput, match="share memory"):
        sign_encode(values, values.view(torch.uint8)[: len(bits)], scales, two_sided=two_sided)
