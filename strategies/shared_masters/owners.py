"""Turns and owners of layers: when each is exchanged, and through whom. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def shared_out(entries: Sequence[int], every: int, owners: int) -> list[tuple[int, int]]:
    """Of each layer its turn, below `every`, and its owner, below `owners`: turns carry about as many entries each, and
    so do the owners in each turn. The largest first, to whoever has least (longest processing time first; Graham,
    1969). The same on all ranks."""
    found = [(0, 0)] * len(entries)
    of_turn = [0] * every
    of_owner = [[0] * owners for _ in range(every)]
    in_all = [0] * owners
    for layer in sorted(range(len(entries)), key=lambda one: (-entries[one], one)):
        turn = min(range(every), key=lambda one: of_turn[one])
        owner = min(range(owners), key=lambda one: (of_owner[turn][one], in_all[one], one))
        found[layer] = (turn, owner)
        for load, at in ((of_turn, turn), (of_owner[turn], owner), (in_all, owner)):
            load[at] += entries[layer]
    return found
