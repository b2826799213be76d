"""Predict a step's seconds for each kind of exchange, on measured computing and links.

Legend: n ranks in J islands, k of them in an island, M entries, v bytes a value.

    gradients              a ring all-reduce beside the backward pass: 2 (n - 1) / n * 4 M bytes over the slowest link,
                           and n - 1 round trips for each piece
    compressed-gradients   each piece as above, or compressed, every rank to every other: 2 k (n - k) / n * v M bytes of
                           an island's link, and one round trip
    nonzeros               planner sparse-scheme's cheapest exact scheme, after the backward pass
    updates                wire_bytes' traffic, and a round trip, while the next step runs
    differences            planner exchange-density's pace, while the next steps run; inside an island gradients
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.controller.planners.islands.exchange_density import (
    ExchangeDensityInput,
    plan_exchange_density,
    steps_for_one_at,
)
from atoll.controller.planners.islands.wire_bytes import UpdateTraffic
from atoll.controller.planners.strategy_choice.facts import ExchangeKind, StrategyCandidate, StrategyInput
from atoll.controller.planners.strategy_choice.links import IslandPaths, Path, inside_path
from atoll.controller.planners.tensor_compression.compression import (
    MAX_TENSORS,
    Option,
    TaskCost,
    TensorTimes,
    timeline,
)
from atoll.planning.sparse_scheme import EXACT, SparseSchemeInput, costs, densities_between

GRADIENT_BYTES: Final = 4
BACKWARD_SHARE: Final = 2 / 3
"""The backward pass's share of a step's computing: it does the forward pass's work twice."""
PIECE_BYTES: Final = 25 * 2**20
FIRST_PIECE_BYTES: Final = 2**20
"""Bytes of gradients that are all-reduced as one, as strategies do."""
COMPRESSION_S: Final = 2e-9
"""Seconds of one core to compress and decompress an entry to 16 bits (docs/performance.md, "Compressed gradients")."""
UNIT_ENTRIES: Final = 64
"""Entries of a row of a sparse tensor: a row has one index."""
INDEX_BYTES: Final = 4
SEARCHED_TASKS: Final = 50_000
"""Simulated tasks of a search for which pieces to compress: a millisecond."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """step_s: seconds. bytes: that the busiest link carries in a step, one way. steps: factor on the candidate's steps,
    because it sends less or later than by its default settings."""

    step_s: float
    bytes: float
    steps: float = 1.0


def predict_step(given: StrategyInput, paths: IslandPaths, candidate: StrategyCandidate) -> PredictedStep:
    """Predict a step of this candidate."""
    return _MODELS[candidate.exchange](given, paths, candidate)


def refusal(given: StrategyInput, candidate: StrategyCandidate) -> str:
    """Return why the candidate cannot be chosen, or would do what a preferred one does; empty if it can."""
    if candidate.refused:
        return candidate.refused
    if candidate.exchange == "nonzeros" and given.gradient_density >= 1:
        return "no gradient is known to be sparse"
    if candidate.exchange == "differences" and len(given.islands) < 2:
        return "there is one island"
    return ""


def _compute_s(given: StrategyInput) -> float:
    return max(rank.compute_s for island in given.islands for rank in island.ranks)


def _ranks(given: StrategyInput) -> int:
    return sum(len(island.ranks) for island in given.islands)


def _pieces(entries: int, backward_s: float) -> list[TensorTimes]:
    """Return gradients in the order of the backward pass, in the pieces that are sent as one."""
    total = entries * GRADIENT_BYTES
    sizes = [min(FIRST_PIECE_BYTES, total)]
    count = min(math.ceil((total - sizes[0]) / PIECE_BYTES), MAX_TENSORS - 1)
    sizes += [(total - sizes[0]) // count] * count if count else []
    return [TensorTimes.model_construct(bytes=size, backward_s=backward_s * size / total) for size in sizes]


def _ring(ranks: int, path: Path | None) -> TaskCost:
    """Return the task of an all-reduce: its cost without a path is none."""
    if path is None or ranks < 2:
        return TaskCost.of_measured(on="link", alpha=0.0, beta=0.0)
    return TaskCost.of_measured(
        on="link", alpha=(ranks - 1) * path.rtt_s, beta=2 * (ranks - 1) / ranks / path.bandwidth
    )


def _with_ring_s(entries: int, compute_s: float, ranks: int, path: Path | None) -> float:
    """Return the seconds of a step whose gradients are all-reduced beside the backward pass."""
    backward_s = BACKWARD_SHARE * compute_s
    pieces = _pieces(entries, backward_s)
    option = Option(name="none", tasks=(_ring(ranks, path),))
    return compute_s - backward_s + timeline(pieces, [option]).end_s([0] * len(pieces))


def _gradients(given: StrategyInput, paths: IslandPaths, candidate: StrategyCandidate) -> PredictedStep:
    ranks = _ranks(given)
    step_s = _with_ring_s(given.entries, _compute_s(given), ranks, paths.ring)
    return PredictedStep(step_s, 2 * (ranks - 1) / ranks * GRADIENT_BYTES * given.entries)


def _compressed(given: StrategyInput, paths: IslandPaths, candidate: StrategyCandidate) -> PredictedStep:
    ranks, compute_s, whole = _ranks(given), _compute_s(given), _gradients(given, paths, candidate)
    if paths.ring is None:
        return whole
    per_byte, slowest_s = _all_to_all(given, paths)
    link = TaskCost.of_measured(
        on="link",
        alpha=paths.rtt_s if paths.uplinks else paths.ring.rtt_s,
        beta=slowest_s,
        factor=candidate.value_bytes / GRADIENT_BYTES,
    )
    compress = TaskCost.of_measured(on="cpu", alpha=0.0, beta=COMPRESSION_S / GRADIENT_BYTES / 2)
    options = [
        Option(name="none", tasks=(_ring(ranks, paths.ring),)),
        Option(name="compressed", tasks=(compress, link, compress)),
    ]
    backward_s = BACKWARD_SHARE * compute_s
    pieces = _pieces(given.entries, backward_s)
    choice, end_s = timeline(pieces, options).search(SEARCHED_TASKS)
    sent = sum(piece.bytes for piece, option in zip(pieces, choice, strict=True) if option)
    bytes_sent = per_byte * sent * candidate.value_bytes / GRADIENT_BYTES
    bytes_sent += 2 * (ranks - 1) / ranks * (given.entries * GRADIENT_BYTES - sent)
    return PredictedStep(min(compute_s - backward_s + end_s, whole.step_s), bytes_sent)


def _all_to_all(given: StrategyInput, paths: IslandPaths) -> tuple[float, float]:
    """Return the bytes of the busiest link for a byte of gradient, and its seconds, if all ranks reduce a part each."""
    ranks = _ranks(given)
    if not paths.uplinks or paths.ring is None:
        per_byte = 2 * (ranks - 1) / ranks
        return per_byte, per_byte / paths.ring.bandwidth if paths.ring is not None else 0.0
    loads = [2 * len(one.ranks) * (ranks - len(one.ranks)) / ranks for one in given.islands]
    busiest = max(range(len(loads)), key=lambda index: loads[index] / paths.uplinks[index])
    return loads[busiest], loads[busiest] / paths.uplinks[busiest]


def _nonzeros(given: StrategyInput, paths: IslandPaths, candidate: StrategyCandidate) -> PredictedStep:
    ranks, compute_s = _ranks(given), _compute_s(given)
    first = given.gradient_density
    last = min(1.0, first * ranks) if given.summed_density is None else max(first, given.summed_density)
    bandwidth = 1.0
    if paths.ring is not None:  # the schemes count a link for each rank: those of an island share theirs
        bandwidth = 2 * (ranks - 1) / ranks / _all_to_all(given, paths)[1]
    asked = SparseSchemeInput(
        workers=ranks,
        entries=max(1, given.entries // UNIT_ENTRIES),
        densities=densities_between(first, last, ranks),
        skew=1.0,
        value_bytes=float(GRADIENT_BYTES * UNIT_ENTRIES),
        index_bytes=float(INDEX_BYTES),
        bandwidth=bandwidth,
        latency=paths.rtt_s / 2 if paths.uplinks else (paths.ring.rtt_s / 2 if paths.ring else 0.0),
    )
    found = costs(asked)
    sums_s = min(found[scheme] for scheme in EXACT)
    if paths.ring is None:
        return PredictedStep(compute_s, sums_s)
    return PredictedStep(compute_s + sums_s, sums_s * bandwidth)


def _updates(given: StrategyInput, paths: IslandPaths, candidate: StrategyCandidate) -> PredictedStep:
    compute_s = _compute_s(given)
    if not paths.uplinks:
        ring = paths.ring
        sent = candidate.density * given.entries * candidate.value_bytes
        return PredictedStep(max(compute_s, sent / ring.bandwidth + ring.rtt_s) if ring else compute_s, sent)
    ranks = _ranks(given)
    traffic = UpdateTraffic(
        given.entries,
        candidate.value_bytes,
        np.array([len(island.ranks) / ranks for island in given.islands]),
        np.array(paths.uplinks),
    )
    carried = [max(pair) for pair in zip(*traffic.carried(candidate.density), strict=True)]
    return PredictedStep(max(compute_s, traffic.seconds(candidate.density) + paths.rtt_s), max(carried))


def _differences(given: StrategyInput, paths: IslandPaths, candidate: StrategyCandidate) -> PredictedStep:
    replica_s = max(
        _with_ring_s(
            given.entries, max(rank.compute_s for rank in island.ranks), len(island.ranks), inside_path(island)
        )
        for island in given.islands
    )
    asked = ExchangeDensityInput.of_measured(
        entries=given.entries,
        bandwidths=paths.uplinks,
        step_s=replica_s,
        value_bytes=candidate.value_bytes,
        enough=candidate.density,
        beside_s=paths.rtt_s,
    )
    planned = plan_exchange_density(asked)
    waited_s = (paths.rtt_s + planned.link_s) / max(1, planned.staleness)
    islands = len(given.islands)
    return PredictedStep(
        step_s=max(replica_s, planned.link_s, waited_s),
        bytes=planned.link_s * min(paths.uplinks),
        steps=steps_for_one_at(planned.density, planned.staleness) if islands > 1 else 1.0,
    )


_MODELS: Final[Mapping[ExchangeKind, Callable[[StrategyInput, IslandPaths, StrategyCandidate], PredictedStep]]] = {
    "gradients": _gradients,
    "compressed-gradients": _compressed,
    "nonzeros": _nonzeros,
    "updates": _updates,
    "differences": _differences,
}
