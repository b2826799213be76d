"""The CUDA kernels against their twins on the CPU: the same bits, wherever they run."""

from __future__ import annotations

import pytest
import torch
from kernels_of import Kernels

from atoll.kernels import _native
from atoll.kernels.compress import BLOCK_ENTRIES, block_count

SIZES = [1, 16, 17, 1025, 2**14 + 3]
SELECTIONS: dict[str, tuple[object, ...]] = {
    "threshold_block": (0.7, 12.0),
    "topk_block": (0.7,),
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
    gradient, residual = normal(entries + shift, 1), normal(entries + shift, 2)
    gradient[shift + entries // 2] = torch.inf
    gradient, residual = gradient.to(where.device)[shift:], residual.to(where.device)[shift:]
    index = torch.full((capacity,), -1, dtype=torch.int32, device=where.device)
    values = torch.full((capacity, BLOCK_ENTRIES), 7.0, device=where.device)
    selection = where.call(name, gradient, residual, *SELECTIONS[name], index, values)
    chosen = selection[0]
    return *selection, *bits(index[:chosen], values[:chosen], residual)


@pytest.mark.parametrize(("entries", "shift"), [*zip(SIZES, (3, 0, 3, 0, 3), strict=True)])
@pytest.mark.parametrize("name", list(SELECTIONS))
def test_a_selection_has_the_cpus_bits(twin: Kernels, name: str, entries: int, shift: int) -> None:
    units = block_count(entries)
    for capacity in {1, units // 7, units}:
        expected = selected(CPU, name, entries, capacity, shift)
        assert selected(twin, name, entries, capacity, shift) == expected


@pytest.mark.parametrize("name", list(SELECTIONS))
def test_a_selection_without_feedback_has_the_cpus_bits(twin: Kernels, name: str) -> None:
    gradient = normal(5000, 3)
    gradient[77] = torch.nan
    results = []
    for where in (CPU, twin):
        index, values = (
            torch.zeros(40, dtype=torch.int32, device=where.device),
            torch.zeros(40, BLOCK_ENTRIES, device=where.device),
        )
        chosen = where.call(name, gradient.to(where.device), None, *SELECTIONS[name], index, values)
        results.append((chosen, *bits(index[: chosen[0]], values[: chosen[0]])))
    assert results[0] == results[1]


def test_ties_and_small_numbers_are_chosen_as_on_the_cpu(twin: Kernels) -> None:
    """The k-th magnitude is one of thousands of equals; zeros and subnormal numbers are among them."""
    gradient = torch.tensor([0.0, 1e-42, -1.0, 1.0, 0.0]).repeat_interleave(BLOCK_ENTRIES).repeat(400)
    for k in (0, 1, 800, 801, 2000):
        results = []
        for where in (CPU, twin):
            index, values = (
                torch.zeros(k, dtype=torch.int32, device=where.device),
                torch.zeros(k, BLOCK_ENTRIES, device=where.device),
            )
            selection = where.call("topk_block", gradient.to(where.device), None, 1.0, index, values)
            chosen = selection[0]
            results.append((selection, *bits(index[:chosen], values[:chosen])))
        assert results[0] == results[1]


def test_a_sample_has_the_cpus_scores(twin: Kernels) -> None:
    gradient, residual = normal(16 * 500 + 5, 1), normal(16 * 500 + 5, 2)
    here, there = torch.zeros(501), torch.zeros(501, device=twin.device)
    _native.sample_scores(gradient, residual, 0.3, 9, here)
    twin.call("sample_scores", gradient.to(twin.device), residual.to(twin.device), 0.3, 9, there)
    assert bits(here) == bits(there)
