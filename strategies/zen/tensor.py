"""Choose and record the scheme of one tensor whose gradient is summed by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import nn

from atoll.agent.runtime.model.memory_order import laid_out_as
from atoll.planning.sparse_scheme import (
    EXACT,
    SCHEMES,
    Scheme,
    SparseSchemeInput,
    SparseSchemePlan,
    densities_between,
    plan_sparse_scheme,
)
from atoll.strategies.zen.blocks import BLOCK_ENTRIES, block_count
from atoll.strategies.zen.coordinates import Coordinates, UnitShape
from atoll.strategies.zen.messages import INDEX_BYTES, VALUE_BYTES

DENSE_WAY: Final[Scheme] = "allreduce"
MAX_COST_RATIO: Final = 0.8
"""Ratio of a scheme's cost to the present one's below which it replaces it."""
MEASURED_EVERY_ROUNDS: Final = 10
"""Rounds from one measurement of densities to the next."""
ASSUMED_BANDWIDTH: Final = 12_500_000.0
"""Bytes a second that are assumed until a link was measured: 100 Mbit/s."""
ROUND_LATENCY_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one pass. densities: of one rank's units, and of all ranks'. blocks: the same of blocks, if
    known. distinct: share of a rank's units whose value does not repeat another's."""

    densities: tuple[float, float]
    blocks: tuple[float, float] | None
    skew: float
    bandwidth: float
    distinct: float = 1.0


class SeparateTensor:
    """A tensor's scheme and measurements. Equal on all ranks but for `measured`, from which rank 0 decides."""

    def __init__(self, number: int, name: str, parameter: nn.Parameter, sparse: bool, asked: Scheme | None) -> None:
        """sparse: its gradients are known to be sparse. asked: the scheme of all sparse tensors; None: the cheapest."""
        self.number, self.name, self.parameter = number, name, parameter
        self.shape = UnitShape.of(parameter)
        self._sparse, self._asked = sparse, asked
        self.scheme: Scheme = (asked or "zen") if sparse else DENSE_WAY
        self.choice = 0  # of rank 0, for the next pass but one; 0: as it is

    @property
    def dense_way(self) -> bool:
        """True if it is summed as strategy `dense` does."""
        return self.scheme == DENSE_WAY and not self._sparse

    @cached_property
    def flat(self) -> torch.Tensor:
        """Flat buffer [numel + 3]: a dense gradient; then the number of ranks that had one, the sum of their densities,
        and the choice."""
        return torch.zeros(self.parameter.numel() + 3, dtype=self.parameter.dtype, device=self.parameter.device)

    @property
    def out(self) -> torch.Tensor:
        """Return the dense gradient, in `flat`."""
        return laid_out_as(self.flat[:-3], self.parameter)

    def adopt(self, choice: int) -> None:
        """Apply rank 0's choice of the pass before, from the next pass on, on all ranks alike."""
        if choice:
            self.scheme = SCHEMES[choice - 1]

    def decide(self, workers: int, measured: Measured) -> str:
        """Choose a scheme on rank 0 from its measurements. Return the reason if it is another scheme than before."""
        given = _planner_input(workers, self.shape, measured)
        plan = plan_sparse_scheme(given)
        best = self._best(plan)
        changes = best != self.scheme and plan.costs[best] < MAX_COST_RATIO * plan.costs[self.scheme]
        self.choice = SCHEMES.index(best) + 1 if changes else 0
        if not changes:
            return ""
        own, of_all = measured.densities
        return (
            f"{self.name}: {own:.2%} of its {self.shape.units} units are in a rank's gradient and {of_all:.2%} in the "
            f"sum of {workers}, {measured.distinct:.0%} of a rank's distinct, skew {measured.skew:.1f}, "
            f"{measured.bandwidth * 8e-6:.0f} Mbit/s: {best} takes {plan.costs[best] * 1e3:.3g} ms, {self.scheme} "
            f"{plan.costs[self.scheme] * 1e3:.3g} ms"
        )

    def _best(self, plan: SparseSchemePlan) -> Scheme:
        asked, costs = self._asked, plan.costs
        if asked is None:
            return min(EXACT, key=lambda scheme: costs[scheme]) if self._sparse else plan.scheme
        if self._sparse:
            return asked
        return asked if costs.get(asked, math.inf) < costs[DENSE_WAY] else DENSE_WAY


def measured_of(sum_: Coordinates, shape: UnitShape, workers: int) -> Measured:
    """Record a sum. sum_: of all ranks, with their tallies. Equal on all ranks."""
    tally, blocks = sum_.tally, -(-shape.units * shape.width // BLOCK_ENTRIES)
    parts = np.searchsorted(sum_.unit, [shape.units * place // workers for place in range(workers + 1)])
    largest = int(np.diff(parts).max()) if len(sum_.unit) else 0
    return Measured(
        densities=(min(tally.units / (workers * shape.units), 1.0), len(sum_.unit) / shape.units),
        blocks=(min(tally.blocks / (workers * blocks), 1.0), block_count(sum_) / blocks),
        skew=max(largest * workers / max(len(sum_.unit), 1), 1.0),
        bandwidth=tally.goodput if math.isfinite(tally.goodput) else ASSUMED_BANDWIDTH,
        distinct=min(tally.distinct / max(tally.units, 1), 1.0) if tally.distinct else 1.0,
    )


def measured_dense(density: float, workers: int) -> Measured:
    """Record a tensor that is summed densely. Only a rank's density is known, so assume that none overlap."""
    return Measured((density, min(1.0, workers * density)), None, 1.0, ASSUMED_BANDWIDTH)


def _planner_input(workers: int, shape: UnitShape, measured: Measured) -> SparseSchemeInput:
    return SparseSchemeInput(
        workers=workers,
        entries=shape.units,
        densities=densities_between(*measured.densities, workers),
        block_densities=densities_between(*measured.blocks, workers) if measured.blocks is not None else None,
        skew=measured.skew,
        value_bytes=float(VALUE_BYTES * shape.width),
        index_bytes=float(INDEX_BYTES),
        bandwidth=max(measured.bandwidth, 1.0),
        latency=ROUND_LATENCY_S,
        distinct=measured.distinct,
    )
