"""Selection with error feedback against plain torch in float64, entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import block_coo
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.kernels import _native, compress
from atoll.kernels.compress import BLOCK_ENTRIES, Selection, block_count

SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 1023, 1025, 2**17 + 1]
F32 = NDArray[np.float32]
NATIVE = {
    "threshold_block": lambda g, r, i, v, **how: _native.threshold_block(g, r, 0.75, 8.0, i, v, **how),
    "topk_block": lambda g, r, i, v, **how: _native.topk_block(g, r, 0.75, i, v, **how),
    "random_block": lambda g, r, i, v, **how: _native.random_block(g, r, 0.75, 5, i, v, **how),
}

SELECT: dict[str, Callable[..., Selection]] = {
    "threshold_block": lambda g, r, i, v: compress.threshold_block(g, r, 8.0, i, v, weight=0.75),
    "topk_block": lambda g, r, i, v: compress.topk_block(g, r, i, v, weight=0.75),
    "random_block": lambda g, r, i, v: compress.random_block(g, r, 5, i, v, weight=0.75),
}


def normal(entries: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device."""
    cpu = torch.randn(entries, generator=torch.Generator().manual_seed(seed), device="cpu")
    return cpu.to(torch.get_default_device())


def room(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count,), -1, dtype=torch.int32), torch.full((count, width), torch.nan)


def padded_blocks(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % BLOCK_ENTRIES)).reshape(-1, BLOCK_ENTRIES)


def scores(v: torch.Tensor) -> torch.Tensor:
    """In float64. No test sets a threshold within rounding of one."""
    return padded_blocks(v).double().abs().sum(1)


def emitted(entries: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The emitted values at their places in a tensor of zeros."""
    width = values.shape[1] if values.ndim == 2 else 1
    out = torch.zeros(-(-entries // width) * width)
    out.reshape(-1, width)[index.long()] = values.reshape(-1, width)
    assert not out[entries:].any(), "the padding is not zeros"
    return out[:entries]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)).all())


@pytest.mark.parametrize(("entries", "weight"), [*((n, 0.3) for n in SIZES), (1025, 1.0)])
@pytest.mark.usefixtures("everywhere")
def test_blocks_above_the_threshold_move_out_and_the_rest_stays(entries: int, weight: float) -> None:
    gradient, residual = normal(entries), normal(entries, seed=1)
    expected = residual + torch.tensor(weight) * gradient
    threshold = float(scores(expected).quantile(0.7)) + 1e-4 if 0 < entries < 10**5 else 14.0
    index, values = room(block_count(entries), BLOCK_ENTRIES)
    selection = compress.threshold_block(gradient, residual, threshold, index, values, weight=weight)
    chosen = (scores(expected) > threshold).nonzero()[:, 0]
    assert selection == Selection(len(chosen), len(chosen), 0)
    assert index[: selection.chosen].tolist() == chosen.tolist()
    assert same_bits(values[: selection.chosen], padded_blocks(expected)[chosen])
    assert not padded_blocks(residual)[chosen].any()
    assert (emitted(entries, chosen, values[: selection.chosen]) + residual == expected).all()


@pytest.mark.parametrize("entries", SIZES)
@pytest.mark.usefixtures("everywhere")
def test_the_best_blocks_are_those_of_torch_topk(entries: int) -> None:
    gradient, residual = normal(entries), normal(entries, seed=1)
    expected = residual + gradient
    count = block_count(entries) // 3
    index, values = room(count, BLOCK_ENTRIES)
    selection = compress.topk_block(gradient, residual, index, values)
    chosen = scores(expected).topk(count).indices.sort().values
    assert selection.chosen == count
    assert index.tolist() == chosen.tolist()
    assert same_bits(values, padded_blocks(expected)[chosen])
    assert (emitted(entries, chosen, values) + residual == expected).all()


@pytest.mark.usefixtures("everywhere")
def test_of_equals_the_first_are_chosen_and_zeros_never() -> None:
    gradient = torch.zeros(160)
    gradient[[5, 20, 40, 100]] = torch.tensor([1.0, -2.0, 2.0, 2.0])
    index, values = room(2, BLOCK_ENTRIES)
    assert compress.topk_block(gradient, None, index, values) == Selection(2, 4, 0)
    assert index.tolist() == [1, 2]
    index, values = room(9, BLOCK_ENTRIES)
    assert compress.topk_block(gradient, None, index, values) == Selection(4, 4, 0)


@pytest.mark.parametrize("entries", SIZES)
@pytest.mark.usefixtures("everywhere")
def test_random_blocks_need_no_indices_on_the_wire(entries: int) -> None:
    gradient, residual = normal(entries), normal(entries, seed=1)
    expected = residual + gradient
    count = block_count(entries) // 4
    index, values = room(count, BLOCK_ENTRIES)
    assert compress.random_block(gradient, residual, 42, index, values).chosen == count
    receivers = torch.zeros(count, dtype=torch.int32, device="cpu")
    block_coo.random_blocks(42, block_count(entries), receivers)
    assert receivers.tolist() == index.tolist() == sorted(set(index.tolist()))
    assert same_bits(values, padded_blocks(expected)[index.long()])
    assert (emitted(entries, index, values) + residual == expected).all()


def test_every_block_is_drawn_about_as_often_as_any_other() -> None:
    blocks, count, draws = 1000, 70, 4000
    often, index = np.zeros(blocks), np.zeros(count, np.uint32)
    for seed in range(draws):
        block_coo.random_blocks(seed, blocks, index)
        often[index] += 1
    assert often.sum() == draws * count
    assert abs(often / (draws * count / blocks) - 1).max() < 0.3  # 5 standard deviations


@pytest.mark.parametrize("kind", list(NATIVE))
@pytest.mark.parametrize(("entries", "feedback"), [(0, True), (1, False), (17, True), (1025, False), (2**18 + 1, True)])
def test_the_bits_do_not_depend_on_threads_or_processor(kind: str, entries: int, feedback: bool) -> None:
    gradient = normal(entries, seed=3)
    if entries > 100:
        gradient[50] = torch.inf
    results = set()
    for how in ({"threads": 1}, {"threads": 2}, {"threads": 7}, {"portable": True}, {"portable": True, "threads": 3}):
        residual = normal(entries, seed=4) if feedback else None
        index, values = room(block_count(entries) // 3, BLOCK_ENTRIES)
        values.zero_()
        selection = NATIVE[kind](gradient, residual, index, values, **how)
        buffers = [index, values] if residual is None else [index, values, residual]
        results.add((selection, *(buffer.numpy().tobytes() for buffer in buffers)))
    assert len(results) == 1


@pytest.mark.parametrize(("kind", "offset"), [*zip(SELECT, (1, 7, 13), strict=True)])
@pytest.mark.usefixtures("everywhere")
def test_misaligned_slices_touch_nothing_around_them(kind: str, offset: int) -> None:
    entries = 1025
    gradient, residual = (torch.full((entries + 32,), torch.nan) for _ in range(2))
    inside = slice(offset, offset + entries)
    gradient[inside], residual[inside] = normal(entries, 1), normal(entries, 2)
    plain_residual = residual[inside].clone()
    index, values = room(20, BLOCK_ENTRIES)
    plain_index, plain_values = room(20, BLOCK_ENTRIES)
    selection = SELECT[kind](gradient[inside], residual[inside], index, values)
    assert SELECT[kind](gradient[inside].clone(), plain_residual, plain_index, plain_values) == selection
    assert selection[2] == 0
    assert (index.tolist(), same_bits(values, plain_values)) == (plain_index.tolist(), True)
    assert same_bits(residual[inside], plain_residual)
    assert residual[:offset].isnan().all()
    assert residual[offset + entries :].isnan().all()


@pytest.mark.usefixtures("everywhere")
def test_a_full_output_leaves_the_rest_in_the_residual_and_tells_the_true_count() -> None:
    gradient, residual = torch.ones(1600), torch.zeros(1600)
    index, values = room(30, BLOCK_ENTRIES)
    assert compress.threshold_block(gradient, residual, 1.0, index, values) == Selection(30, 100, 0)
    assert index.tolist() == list(range(30))
    assert residual.sum() == 70 * 16
    gradient.zero_()
    assert compress.threshold_block(gradient, residual, 1.0, index, values) == Selection(30, 70, 0)
    assert index.tolist() == list(range(30, 60))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 70, 1024])
@pytest.mark.usefixtures("everywhere")
def test_a_block_that_is_not_finite_is_counted_and_keeps_its_old_residual(bad: float, at: int) -> None:
    gradient, residual = normal(1025), normal(1025, seed=1)
    old, block = residual.clone(), at // BLOCK_ENTRIES
    gradient[at] = bad
    inside = slice(block * BLOCK_ENTRIES, (block + 1) * BLOCK_ENTRIES)
    for select in (
        lambda g, r, i, v: compress.threshold_block(g, r, 0.0, i, v),
        compress.topk_block,
    ):
        residual = old.clone()
        index, values = room(65, BLOCK_ENTRIES)
        assert select(gradient, residual, index, values) == Selection(64, 64, 1)
        assert block not in index[:64].tolist()
        assert same_bits(residual[inside], old[inside])
        assert values[:64].isfinite().all()
        assert not residual[: inside.start].any()
    residual = old.clone()
    index, values = room(65, BLOCK_ENTRIES)
    assert compress.random_block(gradient, residual, 1, index, values) == Selection(65, 65, 1)
    assert not values[block].any()
    assert same_bits(residual[inside], old[inside])


@pytest.mark.usefixtures("everywhere")
def test_a_sum_beyond_float32_counts_as_not_finite() -> None:
    gradient = torch.full((32,), 1.0)
    gradient[:16] = 3e38
    index, values = room(2, BLOCK_ENTRIES)
    assert compress.threshold_block(gradient, torch.zeros(32), 0.0, index, values) == Selection(1, 1, 1)
    assert index[0] == 1


@pytest.mark.usefixtures("everywhere")
def test_minus_zero_is_zero_and_the_smallest_numbers_count() -> None:
    gradient = torch.zeros(48)
    gradient[:16] = -0.0
    gradient[20] = 1e-45
    index, values = room(3, BLOCK_ENTRIES)
    assert compress.threshold_block(gradient, torch.zeros(48), 0.0, index, values) == Selection(1, 1, 0)
    assert index[0] == 1
    assert values[0, 4] == torch.tensor(1e-45)


@pytest.mark.usefixtures("everywhere")
def test_without_a_residual_nothing_but_the_outputs_is_written() -> None:
    gradient = normal(1000)
    before = gradient.clone()
    index, values = room(63, BLOCK_ENTRIES)
    selection = compress.threshold_block(gradient, None, 12.0, index, values, weight=0.5)
    assert selection.chosen == (scores(gradient * 0.5) > 12.0).sum()
    selection = compress.threshold_block(gradient, None, 6.0, index, values, weight=0.5)
    chosen = (scores(gradient * 0.5) > 6.0).nonzero()[:, 0]
    assert index[: selection.chosen].tolist() == chosen.tolist()
    assert same_bits(values[: selection.chosen], padded_blocks(gradient * 0.5)[chosen])
    assert same_bits(gradient, before)


@pytest.mark.usefixtures("everywhere")
def test_a_sample_has_the_scores_of_the_blocks_it_drew() -> None:
    gradient, residual = normal(1025), normal(1025, seed=1)
    before = residual.clone()
    gradient[3] = torch.nan
    sample, index = torch.zeros(65), torch.zeros(65, dtype=torch.int32, device="cpu")
    block_coo.random_blocks(9, 65, index)
    compress.sample_scores(gradient, residual, 9, sample, weight=0.5)
    expected = scores(residual + 0.5 * gradient).cpu()[index.long()]
    assert sample[0] == -1.0
    assert sample[1:].tolist() == pytest.approx(expected[1:].tolist(), rel=1e-6)
    assert same_bits(residual, before)


NUMBERS = st.floats(width=32, allow_subnormal=True)


@given(
    gradient=arrays(np.float32, st.integers(0, 200), elements=NUMBERS),
    threshold=st.floats(0, 2.0**100, width=32),
    weight=st.sampled_from([1.0, 0.5, 0.3]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_what_is_emitted_and_what_stays_are_exactly_what_came_in(
    gradient: F32, threshold: float, weight: float, data: st.DataObject
) -> None:
    finite = st.floats(-(2.0**100), 2.0**100, width=32)
    old = data.draw(arrays(np.float32, len(gradient), elements=finite))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = old + np.float32(weight) * gradient
    residual, units = old.copy(), block_count(len(gradient))
    index, values = np.zeros(units, np.uint32), np.zeros((units, BLOCK_ENTRIES), np.float32)
    taken, found, nonfinite = compress.threshold_block(gradient, residual, threshold, index, values, weight=weight)
    assert taken == found <= units - nonfinite
    sent = np.zeros(units * BLOCK_ENTRIES, np.float32)
    sent.reshape(-1, BLOCK_ENTRIES)[index[:taken]] = values[:taken]
    together = sent[: len(gradient)] + residual
    took = np.repeat(np.isin(np.arange(units), index[:taken]), BLOCK_ENTRIES)[: len(gradient)]
    assert not residual[took].any()
    assert np.isfinite(together).all()
    changed = together == expected
    assert (changed | (together == old)).all(), "an entry is neither the new sum nor the old residual"
    assert (~changed).sum() <= nonfinite * BLOCK_ENTRIES


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda g, r, i, v: compress.threshold_block(g, r[:-1], 1.0, i, v), "residual has 31 entries, not 32"),
        (lambda g, r, i, v: compress.threshold_block(g, r, 1.0, i[:1], v), "values has 32 entries, not 16"),
        (lambda g, r, i, v: compress.threshold_block(g, r, float("nan"), i, v), "threshold = nan is not a finite"),
        (lambda g, r, i, v: compress.threshold_block(g, r, -1.0, i, v), "threshold = -1.0"),
        (lambda g, r, i, v: compress.threshold_block(g, g, 1.0, i, v), "gradient and residual share memory"),
        (lambda g, r, i, v: compress.threshold_block(g, r, 1.0, i.float(), v), "index is float32, not uint32 or int32"),
        (lambda g, r, i, v: compress.threshold_block(g.double(), r, 1.0, i, v), "gradient is float64, not float32"),
        (lambda g, r, i, v: compress.threshold_block(None, r, 1.0, i, v), "gradient is None; pass a float32"),
        (lambda g, r, i, v: compress.topk_block(g, r, i, v, weight=float("inf")), "weight = inf is not finite"),
        (lambda g, r, i, v: compress.topk_block(g, r, i, v[:1]), "values has 16 entries, not 32"),
        (lambda g, r, i, v: compress.random_block(g, r, -1, i, v), "random_block"),
        (lambda g, r, i, v: block_coo.random_blocks(1, 1, i.cpu()), "index has room for 2 but there are only 1 blocks"),
        (lambda g, r, i, v: compress.sample_scores(g, r, 1, v), "scores has room for 32 but there are only 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("everywhere")
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(call: Callable[..., Any], says: str) -> None:
    gradient, residual = torch.ones(32), torch.ones(32)
    index, values = room(2, BLOCK_ENTRIES)
    with pytest.raises(BadInput, match=says):
        call(gradient, residual, index, values)
    assert gradient.eq(1).all()
    assert residual.eq(1).all()
    assert index.eq(-1).all()
    assert values.isnan().all()


def test_more_threads_than_the_pool_may_have_are_refused() -> None:
    with pytest.raises(BadInput, match="threads = 300 is not in"):
        compress.topk_block(torch.ones(32), None, *room(2, BLOCK_ENTRIES), threads=300)
