"""Chooses how a sparse tensor is summed over workers: the scheme that takes its links the least time.

The planner behind `atoll decide sparse-scheme`, and what workers ask of the densities that they measure: both rooms
read it here.

Source: Zen (Wang et al., 2023), sections 3.2.4 and 3.2.5, with the bytes of an index and of a value apart, full-duplex
links and a latency for each round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field

from atoll.errors import BadInput
from atoll.planning.schemas import BytesPerSecond, Seconds, Share

Scheme: TypeAlias = Literal["allreduce", "agsparse", "sparcml", "sparse-ps", "omnireduce", "zen"]
SCHEMES: Final[tuple[Scheme, ...]] = ("allreduce", "agsparse", "sparcml", "sparse-ps", "omnireduce", "zen")
"""Schemes in order of preference: of equal costs the first is chosen."""

EXACT: Final[tuple[Scheme, ...]] = ("agsparse", "sparcml", "sparse-ps", "zen")
"""Schemes that keep a unit of which every entry is zero: optimizers for sparse gradients change such a unit too."""

REFERENCE_BYTES: Final = 2
"""Bytes of an entry's reference to its value, if each value is stored once; 4 with more than 65,536 distinct ones."""

MAX_WORKERS: Final = 100_000

_Densities = Annotated[tuple[Share, ...], Field(min_length=1, max_length=MAX_WORKERS)]
_EntryBytes = Annotated[float, Field(ge=0, le=2**40)]


@dataclass(frozen=True, slots=True)
class SparseSchemeInput:
    """workers: n. entries: M, of the tensor; an entry is what has one index, so of an embedding a row.
    densities: share of the entries that are not zero in the sum of 1, 2, ... n workers' gradients. block_densities: the
    same of blocks of 256 neighbouring values. skew: the largest of n equal ranges' densities over the mean one.
    value_bytes, index_bytes: of an entry. bandwidth: bytes a second, each way; latency: seconds of a round. distinct:
    share of a worker's entries whose value is no repetition of another's of that worker."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)]
    entries: Annotated[int, Field(ge=1, le=2**60)]
    densities: _Densities
    skew: Annotated[float, Field(ge=1, le=MAX_WORKERS)]
    value_bytes: _EntryBytes
    index_bytes: _EntryBytes
    bandwidth: BytesPerSecond
    latency: Seconds
    block_densities: _Densities | None = None
    distinct: Share = 1.0


@dataclass(frozen=True, slots=True)
class SparseSchemePlan:
    """scheme: the one of least cost. costs: seconds by scheme; without block densities none of `omnireduce`."""

    scheme: Scheme
    costs: Mapping[Scheme, float]


def densities_between(first: float, last: float, workers: int) -> tuple[float, ...]:
    """Interpolate the densities of sums of 1 ... n workers between the first and the last: d_k = d_1 k^a."""
    if workers == 1 or not first > 0:
        return (first,) * workers
    exponent = math.log(max(last / first, 1.0)) / math.log(workers)
    return tuple(min(first * k**exponent, 1.0) for k in range(1, workers + 1))


def plan_sparse_scheme(given: SparseSchemeInput) -> SparseSchemePlan:
    """Raises BadInput where there is not one density for each number of workers."""
    for name, densities in (("densities", given.densities), ("block_densities", given.block_densities)):
        if densities is not None and len(densities) != given.workers:
            raise BadInput(f"{name} has {len(densities)} entries; give one for each of 1 to {given.workers} workers")
    found = costs(given)
    return SparseSchemePlan(min(found, key=lambda scheme: found[scheme]), found)


def costs(given: SparseSchemeInput) -> dict[Scheme, float]:
    """Seconds on the busiest link, in the order of SCHEMES. n workers, M entries, v and x bytes of value and index:

    allreduce    2 (n - 1) / n M v / B + 2 (n - 1) L
    agsparse     (n - 1) d_1 M (u + x) / B + (n - 1) L
    sparcml      sum over k < log2 n of d_(2^k) M (v + x) / B, the first with u, + log2(n) L, rounded up
    sparse-ps    (n - 1) / n skew (d_1 + d_n) M (v + x) / B + 2 L
    omnireduce   (n - 1) / n skew (b_1 + b_n) M v / B + 2 L
    zen          (n - 1) / n (d_1 M (v + x) + d_n M v + min(M / 8, d_n M x)) / B + 2 L

    A worker's whole gradient has each distinct value once: u = min(v, distinct v + 2), 2 bytes for the reference to it.
    What is split or summed repeats less, and is counted as if it did not.
    """
    n, d, b = given.workers, given.densities, given.block_densities
    values_s = given.entries * given.value_bytes / given.bandwidth
    indices_s = given.entries * given.index_bytes / given.bandwidth
    own_s = min(values_s, given.distinct * values_s + given.entries * REFERENCE_BYTES / given.bandwidth) + indices_s
    both_s, bits_s = values_s + indices_s, given.entries / 8 / given.bandwidth
    others, rounds, latency_s = (n - 1) / n, (n - 1).bit_length(), given.latency
    found: dict[Scheme, float] = {
        "allreduce": 2 * others * values_s + 2 * (n - 1) * latency_s,
        "agsparse": (n - 1) * d[0] * own_s + (n - 1) * latency_s,
        "sparcml": (d[0] * own_s if rounds else 0.0)
        + sum(d[2**k - 1] for k in range(1, rounds)) * both_s
        + rounds * latency_s,
        "sparse-ps": others * given.skew * (d[0] + d[-1]) * both_s + 2 * latency_s,
    }
    if b is not None:
        found["omnireduce"] = others * given.skew * (b[0] + b[-1]) * values_s + 2 * latency_s
    pulled_s = d[-1] * values_s + min(bits_s, d[-1] * indices_s)
    found["zen"] = others * (d[0] * both_s + pulled_s) + 2 * latency_s
    return found
