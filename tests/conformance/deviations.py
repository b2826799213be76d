"""How far weights and losses may be from those of plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

BEHIND: Final[Mapping[str, float]] = {
    "stale-sparse": 0.3,
    "stale-sparse/exact": 0.3,
    "local-steps": 0.2,
    "local-steps/exact": 0.25,
    "stale-sparse/gradients-exact": 0.1,
    "groups": 0.35,
    "groups/exact": 0.35,
}
"""How far a loss may lie behind the worst of three seeds, as a share of the gain of plain torch's twelve steps.

The largest of all cases and one step of the twelve, rounded up to a twentieth. `stale-sparse` and `local-steps` send a
fifth of what is due, a step later. By settings that leave nothing out they add up updates of adaptive optimizers, whose
moments are of each rank's own gradients. Under `groups` one replica may train a whole round, as while others compile:
it makes three updates for one of plain torch, and by these plain torch itself passes points that lie 0.22 behind."""
CLOSE: Final = 0.02
"""The same for all other strategies: rounding. They stay within the spread of the seeds."""


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
