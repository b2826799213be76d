"""Links between the islands of a run: the ring through all of them, and what each island sends to all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from atoll.controller.planners.strategy_choice.facts import IslandLink, MeasuredIsland, StrategyInput


@dataclass(frozen=True, slots=True)
class Path:
    """bandwidth: bytes a second. rtt_s: seconds of a round trip."""

    bandwidth: float
    rtt_s: float


@dataclass(frozen=True, slots=True)
class IslandPaths:
    """ring: the slowest link of a ring through all ranks; None with one rank, or if no link is known. uplinks: of each
    island, the bandwidth at which it exchanges equal parts with all other islands; empty with one island. rtt_s: the
    longest round trip between islands."""

    ring: Path | None
    uplinks: tuple[float, ...]
    rtt_s: float


def island_paths(given: StrategyInput) -> IslandPaths | None:
    """Return the paths; None if there are several islands and none of the links between them was measured."""
    islands, inside = given.islands, _inside(given.islands)
    if len(islands) == 1:
        return IslandPaths(inside, (), 0.0)
    if not given.links:
        return None
    between = _between(islands, given.links)
    names = [island.name for island in islands]
    hops = [between[pair] for pair in pairwise([*names, names[0]])]
    ring = _slowest([*hops, *([inside] if inside is not None else [])])
    return IslandPaths(
        ring, tuple(_uplink(names, name, between) for name in names), max(p.rtt_s for p in between.values())
    )


def inside_path(island: MeasuredIsland) -> Path | None:
    """Return the link between ranks of an island; None with one rank, or if it was not measured."""
    if len(island.ranks) < 2 or island.bandwidth_bps is None:
        return None
    return Path(island.bandwidth_bps / 8, island.rtt_s)


def _inside(islands: Sequence[MeasuredIsland]) -> Path | None:
    found = [path for island in islands if (path := inside_path(island)) is not None]
    return _slowest(found) if found else None


def _slowest(paths: Sequence[Path]) -> Path:
    return Path(min(path.bandwidth for path in paths), max(path.rtt_s for path in paths))


def _between(islands: Sequence[MeasuredIsland], links: Sequence[IslandLink]) -> dict[tuple[str, str], Path]:
    """Return a path for each ordered pair: as measured, or the reverse, or the slowest that was measured."""
    measured = {(link.source, link.target): Path(link.bandwidth_bps / 8, link.rtt_s) for link in links}
    rest = _slowest(list(measured.values()))
    names = [island.name for island in islands]
    pairs = [(a, b) for a in names for b in names if a != b]
    return {(a, b): measured.get((a, b), measured.get((b, a), rest)) for a, b in pairs}


def _uplink(names: Sequence[str], name: str, between: dict[tuple[str, str], Path]) -> float:
    """Return the bandwidth of the direction that carries less. A single pair's link carries an equal part at most."""
    others = [other for other in names if other != name]

    def carried(rates: Sequence[float]) -> float:
        return min(max(rates), len(others) * min(rates))

    sends = [between[name, other].bandwidth for other in others]
    receives = [between[other, name].bandwidth for other in others]
    return min(carried(sends), carried(receives))
