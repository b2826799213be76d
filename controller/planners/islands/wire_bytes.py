"""Count the bytes of a sparse step on the links between islands: values, indices and copies.

Each rank selects its even part of the entries that a step sends. The parts of an island travel as one sum, from its
leader to every other leader. At sparsity 0 each rank sends all entries of its own update. A link is full duplex: it
carries what its island sends beside what it receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atoll.controller.planners.batches.water_filling import F64

BLOCK_ENTRIES: Final = 16
"""Entries that share an index."""
VALUE_BYTES: Final[Mapping[str, float]] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1.125, "int4": 0.625, "int2": 0.2578125,
}  # fmt: skip
"""Bytes of a value on the wire, with its part of scales (kernels/cpu/codec/wire_values.hpp)."""


MIN_SPARSITY: Final = 1e-4
"""The smallest sparsity above 0 that a plan has. Rounded to 0 it would send as many times more as there are ranks."""


def update_density(sparsity: float, ranks: int) -> float:
    """Return the shares of their own entries that all ranks send in a step, summed over the ranks.

    It jumps at 0: below any larger sparsity the ranks share 1 - sparsity, at 0 each of them sends its whole update."""
    return 1 - sparsity if sparsity > 0 else float(ranks)


@dataclass(frozen=True, slots=True)
class UpdateTraffic:
    """entries: number of the model's parameters. value_bytes: bytes of one on the wire. part_J: each island's share of
    the entries that are sent; an island without devices has none and no traffic. bandwidth_J: bytes a second, each
    way."""

    entries: int
    value_bytes: float
    part_J: F64
    bandwidth_J: F64

    def seconds(self, density: float) -> float:
        """Return the seconds that the slowest link needs for a step of this density; 0 for one island."""
        rate_J: list[float] = self.bandwidth_J.tolist()
        sent_J, received_J = self.carried(density)
        return max(max(sent, came) / rate for sent, came, rate in zip(sent_J, received_J, rate_J, strict=True))

    def carried(self, density: float) -> tuple[list[float], list[float]]:
        """Return the bytes that each island sends, and those it receives, in a step of this density (see
        `update_density`). Lists, not arrays: a plan tries thousands of densities, for a few islands each."""
        part_J = self.part_J.tolist()
        density_J = [min(density * part, 1.0) for part in part_J]  # an island's ranks travel as one sum
        sum_J = [self.entries * d * (self.value_bytes + index_bytes(d) / BLOCK_ENTRIES) for d in density_J]
        others, whole = sum(part > 0 for part in part_J) - 1, sum(sum_J)
        return [others * s for s in sum_J], [whole - s if p > 0 else 0.0 for p, s in zip(part_J, sum_J, strict=True)]

    def density_within(self, seconds: float) -> float:
        """Return the largest density that every link carries in this time, to 1e-9 below; 1 if all entries fit."""
        if self.seconds(1.0) <= seconds:
            return 1.0
        # Time is nearly proportional to the density: bytes an entry change by 1 % where the density changes by half,
        # so each round is closer by a factor of fifty and more.
        density, before = 1.0, 0.0
        while abs(density - before) > 1e-11 * density:
            density, before = min(1.0, density * seconds / self.seconds(density)), density
        return density * (1 - 1e-9)


def index_bytes(density: float) -> float:
    """Return the bytes of an index as the gap to the one before, 7 bits a byte, for blocks chosen at random with this
    density.

        bytes(d) = 1 + (1 - d)^(2^7) + (1 - d)^(2^14) + (1 - d)^(2^21)

    A gap reaches 2^7 with probability (1 - d)^(2^7), and so on."""
    found, longer = 1.0, 1 - density
    for _ in range(3):
        for _ in range(7):
            longer = longer * longer  # a power's last bit would depend on the CPU, and recorded plans on it
        found += longer
    return found
