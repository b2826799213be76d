"""Every algorithm: what a payload stands for and what it leaves out are together what came in, and what is left out is
less than that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithms import EVERY, SETTINGS
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.errors import BadInput
from atoll.strategies.compressed.algorithms import compressor_of, density_at
from atoll.strategies.compressed.codes.compressors import CodePlace, Compressor
from atoll.strategies.compressed.codes.sparse_codes import (
    MIN_SAMPLED_ENTRIES,
    chosen_of,
    compress_with_momentum,
    largest_places,
    random_places,
)
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.compressed.worker import CompressedReducer

SHAPES = ((40, 30), (7,), (), (5, 4, 3), (1, 9))
ENTRIES = sum(int(np.prod(shape)) for shape in SHAPES)


def made(name: str) -> Compressor:
    return compressor_of(SETTINGS[name], seed=5)


def at(round_: int = 1, first: int = 0, *, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> CodePlace:
    return CodePlace(round_, first, shapes, 0.1)


def normal(seed: int, entries: int = ENTRIES, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(entries, generator=torch.Generator().manual_seed(seed))


@EVERY
def test_nothing_is_lost(name: str) -> None:
    """decoded + residual = value + residual before, to a rounding of the larger."""
    for scale in (1e-30, 1e-4, 1.0, 1e6):
        compressor, residual = made(name), normal(2, scale=scale)
        for round_ in range(1, 5):
            value, before = normal(10 + round_, scale=scale), residual.clone()
            payload = compressor.compress(value, residual, at(round_))
            decoded = torch.zeros(ENTRIES)
            compressor.decompress(payload.data, decoded, at(round_))
            torch.testing.assert_close(decoded + residual, before + value, rtol=1e-5, atol=1e-5 * scale * 10)


@EVERY
def test_it_is_a_contraction(name: str) -> None:
    """|v - C(v)|^2 <= (1 - delta) |v|^2: of random-k in the mean over rounds, of the others each time. Error feedback
    converges for such (Stich et al., 2018; Karimireddy et al., 2019)."""
    left, whole = 0.0, 0.0
    for round_ in range(1, 40):
        value, residual = normal(round_), torch.zeros(ENTRIES)
        made(name).compress(value, residual, at(round_))
        one, all_ = float(residual.square().sum()), float(value.square().sum())
        assert one < all_ or name == "random-k"
        left, whole = left + one, whole + all_
    assert left < 0.95 * whole


@EVERY
def test_residuals_stay_bounded_and_everything_arrives_in_time(name: str) -> None:
    """The same gradient in each step: after enough of them the mean of what arrived is that gradient."""
    compressor, residual, arrived = made(name), torch.zeros(ENTRIES), torch.zeros(ENTRIES)
    value, steps = normal(3), 200
    for round_ in range(1, steps + 1):
        payload = compressor.compress(value, residual, at(round_))
        compressor.decompress(payload.data, arrived, at(round_))
    assert float((arrived / steps - value).norm()) < 0.15 * float(value.norm())


@EVERY
def test_decoding_has_the_same_bits_in_any_process_and_any_order_of_ranks_is_kept(name: str) -> None:
    """Decoders that never compressed, as other ranks' are, add to what is there in the order that they are asked."""
    payloads = [made(name).compress(normal(seed), torch.zeros(ENTRIES), at(7)) for seed in range(3)]
    one_process, another = torch.zeros(ENTRIES), torch.zeros(ENTRIES)
    decoder = made(name)
    for payload in payloads:
        decoder.decompress(payload.data, one_process, at(7))
        made(name).decompress(payload.data, another, at(7))
    assert torch.equal(one_process, another)


@EVERY
def test_any_number_of_entries(name: str) -> None:
    for entries in (1, 7, 1023, 1025):
        value, residual, place = normal(1, entries), torch.zeros(entries), at(shapes=((entries,),))
        compressor, decoded = made(name), torch.zeros(entries)
        payload = compressor.compress(value, residual, place)
        compressor.decompress(payload.data, decoded, place)
        torch.testing.assert_close(decoded + residual, value, rtol=1e-5, atol=1e-5)


@EVERY
def test_a_payload_of_another_length_is_refused(name: str) -> None:
    payload = made(name).compress(normal(1), torch.zeros(ENTRIES), at())
    for wrong in (payload[:-1], *(np.concatenate([payload, np.zeros(more, np.uint8)]) for more in (1, 4))):
        with pytest.raises(BadInput):
            made(name).decompress(wrong.data, torch.zeros(ENTRIES), at())


def test_indices_that_cannot_be_are_refused() -> None:
    for index in ([5, 5], [6, 5], [0, ENTRIES], [0, 2**31]):
        payload = np.concatenate(
            [np.array([2], "<u4").view(np.uint8), np.array(index, "<u4").view(np.uint8), np.zeros(8, np.uint8)]
        )
        with pytest.raises(BadInput, match="its indices do not ascend, or reach beyond the last"):
            made("dgc").decompress(payload.data, torch.zeros(ENTRIES), at())


@pytest.mark.parametrize("entries", [0, 1, 33, 1025, MIN_SAMPLED_ENTRIES + 1, 400_003])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["normal", "rounded", "one large part", "mostly zeros"])
def test_the_largest_entries_are_chosen_of_equals_the_first_and_never_zeros(
    entries: int, density: float, kind: str
) -> None:
    """Compared with a stable sort. A sample misjudges entries whose size depends on their place, as of one large
    part."""
    entry_N = normal(4, entries)
    if kind == "rounded":
        entry_N = (2 * entry_N).round()  # thousands of equals
    elif kind == "one large part":
        entry_N[entries // 3 : entries // 2] *= 1e4
    elif kind == "mostly zeros":
        entry_N[normal(5, entries) < 2.5] = 0
    count = chosen_of(entries, density)
    ranked = entry_N.abs().sort(descending=True, stable=True)
    expected = ranked.indices[:count][ranked.values[:count] > 0].sort().values
    assert largest_places(entry_N, count).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["dgc", "threshold"])
@pytest.mark.parametrize("entries", [0, 31, 1025, MIN_SAMPLED_ENTRIES + 1])
def test_sent_entries_leave_the_residual_and_keep_their_bits(name: str, entries: int) -> None:
    value, residual = normal(1, entries), normal(2, entries)
    whole, place, decoded = residual + value, at(shapes=((entries,),)), torch.zeros(entries)
    compressor = made(name)
    compressor.decompress(compressor.compress(value, residual, place).data, decoded, place)
    sent = decoded != 0
    assert sent.any() == (entries > 0)
    assert torch.equal(torch.where(sent, decoded, residual), whole)
    assert not residual[sent].any()
    assert not sent.any() or whole[sent].abs().min() >= residual.abs().max()


def test_momentum_is_corrected_and_masked_where_it_was_sent() -> None:
    """u = m u + g, r = r + u; of what was sent both are zero after it."""
    compressor = compressor_of(Compressed(algorithm="dgc", density=0.5, momentum=0.5), seed=1)
    velocity, residual, place = torch.zeros(4), torch.zeros(4), CodePlace(1, 0, ((4,),), 0.5)
    compress_with_momentum(compressor, torch.tensor([4.0, 3.0, 1.0, 2.0]), velocity, residual, place, momentum=0.5)
    assert residual.tolist() == velocity.tolist() == [0, 0, 1, 2]
    compress_with_momentum(compressor, torch.zeros(4), velocity, residual, place, momentum=0.5)
    assert residual.tolist() == velocity.tolist() == [0, 0, 0, 0]  # 1 + 0.5, 2 + 1: the largest now


def test_the_density_of_dgc_falls_while_it_warms_up() -> None:
    settings = Compressed(algorithm="dgc", density=0.001, warmup_steps=100)
    falling = [density_at(settings, step) for step in range(0, 120, 10)]
    assert falling[0] == 0.25
    assert falling[:11] == sorted(falling[:11], reverse=True)
    assert falling[10:] == [0.001, 0.001]
    assert density_at(Compressed(algorithm="random-k", density=0.001, warmup_steps=100), 0) == 0.001


def test_random_places_are_different_everywhere_and_each_comes_up() -> None:
    seen = np.zeros(50, np.int64)
    for round_ in range(400):
        places = random_places(50, 7, (3, round_))
        assert len(set(places.tolist())) == 7
        assert places.tolist() == sorted(places.tolist())
        assert places[0] >= 0
        assert places[-1] < 50
        seen[places] += 1
    assert seen.min() > 25
    assert random_places(5, 5, (1,)).tolist() == [0, 1, 2, 3, 4]
    assert random_places(0, 0, (1,)).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [[3.0, -4.0], [30.0, -40.0], [0.0, -0.0], [torch.nan, 40.0], [torch.inf, 40.0]])
def test_a_tensor_is_clipped_without_asking_its_device(given: list[float], dtype: torch.dtype) -> None:
    """1. Whether the norm is too large was asked of the device in a hook, for which the backward pass waited. 2. The
    bits are what they were: a norm that is not finite clips nothing."""
    part = torch.tensor(given, dtype=dtype)
    norm = part.float().norm()
    expected = part * (10.0 / norm) if norm > 10 and norm.isfinite() else part.clone()
    clipped = part.clone()
    with NothingAsked():
        CompressedReducer._clip_tensor(clipped, 10.0)
    assert torch.equal(clipped.view(torch.uint8), expected.to(dtype).view(torch.uint8))


class NothingAsked(TorchDispatchMode):
    """Refuses what would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
