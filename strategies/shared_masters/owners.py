"""Owners and turns of layers: through whom each is exchanged, and when. Pure, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def owners_of(entries: Sequence[int], owners: int) -> list[int]:
    """The owner of each layer, below `owners`: about as many entries each."""
    found, loads = [0] * len(entries), [0] * owners
    for layer in _largest_first(entries):
        owner = min(range(owners), key=lambda one: (loads[one], one))
        found[layer] = owner
        loads[owner] += entries[layer]
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
