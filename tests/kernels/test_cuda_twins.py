"""The CUDA kernels against their twins on the CPU: the same bits, wherever they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels_of import Kernels

from atoll.errors import BadInput
from atoll.kernels import _native, scatter_blocks
from atoll.kernels.compress import BLOCK_ENTRIES, block_count

SIZES = [1, 16, 17, 1025, 2**14 + 3]
SELECTIONS: dict[str, tuple[object, ...]] = {
    "threshold_block": (0.7, 12.0),
    "threshold_element": (0.7, 1.5),
    "topk_block": (0.7,),
    "topk_element": (0.7,),
    "random_block": (0.7, 2**63 + 5),
}
Bits = tuple[object, ...]
CPU = Kernels(_native, "cpu", ())


def normal(entries: int, seed: int) -> torch.Tensor:
    return torch.randn(entries, generator=torch.Generator().manual_seed(seed))


def bits(*buffers: torch.Tensor | None) -> Bits:
    return tuple(None if x is None else x.cpu().view(torch.uint8).numpy().tobytes() for x in buffers)


def selected(where: Kernels, name: str, entries: int, capacity: int, shift: int) -> Bits:
    """Effects of one call on buffers that begin `shift` entries into their memory."""
    width = 1 if "element" in name else BLOCK_ENTRIES
    gradient, residual = normal(entries + shift, 1), normal(entries + shift, 2)
    gradient[shift + entries // 2] = torch.inf
    gradient, residual = gradient.to(where.device)[shift:], residual.to(where.device)[shift:]
    index = torch.full((capacity,), -1, dtype=torch.int32, device=where.device)
    values = torch.full((capacity, width), 7.0, device=where.device)
    selection = where.call(name, gradient, residual, *SELECTIONS[name], index, values)
    chosen = selection[0]
    return *selection, *bits(index[:chosen], values[:chosen], residual)


@pytest.mark.parametrize(("entries", "shift"), [*zip(SIZES, (3, 0, 3, 0, 3), strict=True)])
@pytest.mark.parametrize("name", list(SELECTIONS))
def test_a_selection_has_the_cpus_bits(twin: Kernels, name: str, entries: int, shift: int) -> None:
    units = entries if "element" in name else block_count(entries)
    for capacity in {1, units // 7, units}:
        expected = selected(CPU, name, entries, capacity, shift)
        assert selected(twin, name, entries, capacity, shift) == expected


@pytest.mark.parametrize("name", list(SELECTIONS))
def test_a_selection_without_feedback_has_the_cpus_bits(twin: Kernels, name: str) -> None:
    gradient = normal(5000, 3)
    gradient[77] = torch.nan
    width, results = 1 if "element" in name else BLOCK_ENTRIES, []
    for where in (CPU, twin):
        index, values = (
            torch.zeros(40, dtype=torch.int32, device=where.device),
            torch.zeros(40, width, device=where.device),
        )
        chosen = where.call(name, gradient.to(where.device), None, *SELECTIONS[name], index, values)
        results.append((chosen, *bits(index[: chosen[0]], values[: chosen[0]])))
    assert results[0] == results[1]


def test_ties_and_small_numbers_are_chosen_as_on_the_cpu(twin: Kernels) -> None:
    """The k-th magnitude is one of thousands of equals; zeros and subnormal numbers are among them."""
    gradient = torch.tensor([0.0, 1e-42, -1.0, 1.0, 0.0]).repeat(4000)
    for k in (0, 1, 8000, 8001, 20000):
        results = []
        for where in (CPU, twin):
            index, values = (
                torch.zeros(k, dtype=torch.int32, device=where.device),
                torch.zeros(k, 1, device=where.device),
            )
            selection = where.call("topk_element", gradient.to(where.device), None, 1.0, index, values)
            chosen = selection[0]
            results.append((selection, *bits(index[:chosen], values[:chosen])))
        assert results[0] == results[1]


def test_a_sample_has_the_cpus_scores(twin: Kernels) -> None:
    gradient, residual = normal(16 * 500 + 5, 1), normal(16 * 500 + 5, 2)
    here, there = torch.zeros(501), torch.zeros(501, device=twin.device)
    _native.sample_scores(gradient, residual, 0.3, 9, here)
    twin.call("sample_scores", gradient.to(twin.device), residual.to(twin.device), 0.3, 9, there)
    assert bits(here) == bits(there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entries", [0, 1, 16, 1025])
@pytest.mark.usefixtures("everywhere")
def test_scattered_blocks_arrive_rounded_as_torch_rounds_and_the_others_stay(entries: int, dtype: torch.dtype) -> None:
    live = torch.full((entries,), 5.0, dtype=dtype)
    index = torch.arange(0, block_count(entries), 2, dtype=torch.int32)  # of 65 blocks also the last, of one entry
    values = (normal(len(index) * BLOCK_ENTRIES, 1) * 1e5).view(-1, BLOCK_ENTRIES).to(live.device)
    scatter_blocks(live, index, values)
    expected = torch.full((block_count(entries), BLOCK_ENTRIES), 5.0, dtype=dtype)
    expected[index.long()] = values.to(dtype)
    assert bits(live) == bits(expected.flatten()[:entries])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p, i, v: scatter_blocks(p, i, v[:1]), "values has 16 entries"),
        (lambda p, i, v: scatter_blocks(p.double(), i, v), "live is .*float64, not float32, float16 or bfloat16"),
        (lambda p, i, v: scatter_blocks(p.view(5, 6).t(), i, v), "live is not contiguous"),
    ],
)
@pytest.mark.usefixtures("everywhere")
def test_a_scatter_that_does_not_fit_is_refused_and_changes_nothing(call: Callable[..., None], says: str) -> None:
    live, index, values = torch.ones(30), torch.arange(2, dtype=torch.int32), torch.zeros(2, BLOCK_ENTRIES)
    with pytest.raises(BadInput, match=says):
        call(live, index, values)
    assert live.eq(1).all()


@pytest.mark.parametrize("index", [[0, 2], [1, 0], [1, 1], [-1, 0]])
def test_a_scatter_beyond_the_end_is_refused_on_the_cpu(index: list[int]) -> None:
    live = torch.ones(30)
    with pytest.raises(BadInput, match="index does not ascend, or reaches beyond the last of 2"):
        scatter_blocks(live, torch.tensor(index, dtype=torch.int32), torch.zeros(2, BLOCK_ENTRIES))
    assert live.eq(1).all()


def test_a_scatter_on_a_device_never_writes_beyond_the_end(twin: Kernels) -> None:
    memory = torch.ones(64, device=twin.device)
    index = torch.tensor([0, 2, -1], dtype=torch.int32, device=twin.device)  # -1 is read as 2^32 - 1
    twin.call("scatter_blocks", memory[:30], index, torch.zeros(3, BLOCK_ENTRIES, device=twin.device))
    assert memory[:16].eq(0).all()
    assert memory[16:].eq(1).all()
