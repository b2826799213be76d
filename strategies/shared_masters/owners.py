"""Owners and turns of layers: through whom each is exchanged, and when. Pure, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def owners_of(entries: Sequence[int], owners: int, before: Sequence[int | None] = ()) -> list[int]:
    """The owner of each layer, below `owners`: about as many entries each. before: by layer, who has what was summed of
    it, and keeps it unless that were uneven by more than the largest layer; None, or empty: nobody."""
    found, loads = [-1] * len(entries), [0] * owners
    for layer, owner in enumerate(before):
        if owner is not None:
            found[layer] = owner
            loads[owner] += entries[layer]
    for layer in _largest_first(entries):
        if found[layer] < 0:
            found[layer] = owner = min(range(owners), key=lambda one: (loads[one], one))
            loads[owner] += entries[layer]
    while (gap := max(loads, default=0) - min(loads, default=0)) > max(entries, default=0):
        most, least = loads.index(max(loads)), loads.index(min(loads))
        of_most = [layer for layer, owner in enumerate(found) if owner == most]
        moved = min(of_most, key=lambda layer: (abs(entries[layer] - gap / 2), layer))
        found[moved] = least
        loads[most] -= entries[moved]
        loads[least] += entries[moved]
    return found


def turns_of(entries: Sequence[int], owner_of: Sequence[int], every: int) -> list[int]:
    """The turn of each layer, below `every`: turns carry about as many entries each of every owner, and so in all."""
    found, in_all = [0] * len(entries), [0] * every
    of_owner: dict[int, list[int]] = {owner: [0] * every for owner in owner_of}
    for layer in _largest_first(entries):
        own = of_owner[owner_of[layer]]
        turn = min(range(every), key=lambda one: (own[one], in_all[one], one))
        found[layer] = turn
        own[turn] += entries[layer]
        in_all[turn] += entries[layer]
    return found


def _largest_first(entries: Sequence[int]) -> Iterator[int]:
    """Each to whoever has least: longest processing time first (Graham, 1969)."""
    return iter(sorted(range(len(entries)), key=lambda one: (-entries[one], one)))
