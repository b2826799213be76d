"""Aggregators and turns of layers: which island aggregates each layer, and when. Pure, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aggregators_of(entries: Sequence[int], aggregators: int, before: Sequence[int | None] = ()) -> list[int]:
    """Return the aggregator of each layer, below `aggregators`. Each aggregates about as many entries.

    before: by layer, the aggregator that has its sum; None, or empty: there is none. It stays the aggregator unless
    loads would differ by more than the largest layer."""
    found, loads = [-1] * len(entries), [0] * aggregators
    for layer, aggregator in enumerate(before):
        if aggregator is not None:
            found[layer] = aggregator
            loads[aggregator] += entries[layer]
    for layer in _largest_first(entries):
        if found[layer] < 0:
            found[layer] = aggregator = min(range(aggregators), key=lambda one: (loads[one], one))
            loads[aggregator] += entries[layer]
    while (gap := max(loads, default=0) - min(loads, default=0)) > max(entries, default=0):
        most, least = loads.index(max(loads)), loads.index(min(loads))
        of_most = [layer for layer, aggregator in enumerate(found) if aggregator == most]
        moved = min(of_most, key=lambda layer: (abs(entries[layer] - gap / 2), layer))
        found[moved] = least
        loads[most] -= entries[moved]
        loads[least] += entries[moved]
    return found


def turns_of(entries: Sequence[int], aggregator_of: Sequence[int], every: int) -> list[int]:
    """Return the turn of each layer, below `every`.

    Turns carry about as many entries of each aggregator, and so in all."""
    found, in_all = [0] * len(entries), [0] * every
    of_aggregator: dict[int, list[int]] = {aggregator: [0] * every for aggregator in aggregator_of}
    for layer in _largest_first(entries):
        own = of_aggregator[aggregator_of[layer]]
        turn = min(range(every), key=lambda one: (own[one], in_all[one], one))
        found[layer] = turn
        own[turn] += entries[layer]
        in_all[turn] += entries[layer]
    return found


def _largest_first(entries: Sequence[int]) -> Iterator[int]:
    """Yield layers from the largest to the smallest, each for the least loaded aggregator or turn.

    Source: longest processing time first (Graham, 1969)."""
    return iter(sorted(range(len(entries)), key=lambda one: (-entries[one], one)))
