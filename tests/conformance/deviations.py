"""How far weights are from those of plain torch."""

from __future__ import annotations

import torch


def deviation(actual: torch.Tensor, whole: torch.Tensor, start: torch.Tensor | None) -> float:
    """Return the distance from plain torch as a share of the way that plain torch went; infinity if only one moved."""
    if actual.shape != whole.shape or actual.dtype != whole.dtype:
        return float("inf")
    if whole.dtype.is_complex:
        actual, whole, start = (torch.view_as_real(one) if one is not None else None for one in (actual, whole, start))
    if not whole.dtype.is_floating_point or start is None:
        return 0.0 if torch.allclose(actual.double(), whole.double(), rtol=1e-2, atol=1e-3) else float("inf")
    if torch.equal(whole, start):
        return 0.0 if torch.equal(actual, whole) else float("inf")
    if not (torch.isfinite(whole).all() and torch.isfinite(actual).all()):
        return 0.0 if torch.equal(torch.isfinite(actual), torch.isfinite(whole)) else float("inf")
    way = (whole.double() - start.double()).norm()
    return float((actual.double() - whole.double()).norm() / way.clamp(min=1e-3))
