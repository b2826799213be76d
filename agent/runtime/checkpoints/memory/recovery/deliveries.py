"""Plans how a shard comes to the ranks that lack it: once over the network for each machine, from all who have it.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence


def deliveries(holders: Collection[int], machines: Sequence[Hashable], turn: int = 0) -> list[tuple[int, int]]:
    """(from, to), in order: first one rank of each machine that lacks it, whose mates then have it from that one.

    holders: ranks that can read it, at least one. machines: by rank. turn: of the shard among others, so that not the
    same ranks send first each time. Who has received it sends as well, so all have it after about log2 of the machines
    rounds."""
    by_machine: dict[Hashable, list[int]] = {}
    for rank, machine in enumerate(machines):
        by_machine.setdefault(machine, []).append(rank)
    have = _turned(sorted(holders), turn)
    lack = [ranks for ranks in by_machine.values() if not set(ranks) & set(have)]
    found = _doubling(have, [ranks[turn % len(ranks)] for ranks in lack])
    have += [to for _, to in found]
    for ranks in by_machine.values():
        found += _doubling([rank for rank in have if rank in ranks], [rank for rank in ranks if rank not in have])
    return found


def _doubling(have: Sequence[int], lack: Sequence[int]) -> list[tuple[int, int]]:
    """Send in rounds: in each round every rank that has it sends it to one that lacks it."""
    senders, found, left = list(have), [], list(lack)
    while left:
        pairs = list(zip(senders, left, strict=False))
        found += pairs
        senders += [to for _, to in pairs]
        left = left[len(pairs) :]
    return found


def _turned(ranks: list[int], turn: int) -> list[int]:
    at = turn % len(ranks)
    return ranks[at:] + ranks[:at]
