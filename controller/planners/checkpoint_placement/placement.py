"""Choose whose CPU memory holds the replicas of whose checkpoint.

Source: Gemini (Wang et al., 2023), Algorithm 6.1: groups of m consecutive machines that hold each other's replicas. If
m does not divide N, the last group takes the rest and is a ring. Failure domains, islands, links and small changes
after a membership change are ours."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Annotated, Final

from pydantic import Discriminator, Field, Tag, model_validator

from atoll.controller.planners.checkpoint_placement.failure_domains import Block, Domains, Machine, held, require_nested
from atoll.controller.planners.checkpoint_placement.placement_changes import Previous, adapt
from atoll.errors import BadInput, NoFeasiblePlan
from atoll.planning.replica_room import fitted
from atoll.planning.schemas import MAX_NODES, Bytes, Name, Schema

MAX_REPLICAS: Final = 1000
GENERATIONS: Final = 2
"""Checkpoints kept of every replica: the last complete one and the one being written."""
_UNLIMITED_BYTES: Final = 2**62
"""Bytes of memory of a machine that does not report it."""


_Holders = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_REPLICAS)]


class PlacementInput(Schema):
    """machines: a description of each, or their number. replicas: copies of each machine's checkpoint, its own
    included. checkpoint_bytes: size of one machine's checkpoint, if known. site_safe: put replicas on different
    islands, not within one. previous: names of the holders, by the machine's name."""

    machines: Annotated[
        Annotated[int, Field(ge=1, le=MAX_NODES), Tag("(count)")]
        | Annotated[tuple[Machine, ...], Field(min_length=1, max_length=MAX_NODES), Tag("(each)")],
        Discriminator(lambda machines: "(count)" if isinstance(machines, int) else "(each)"),
    ]
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    checkpoint_bytes: Bytes | None = None
    site_safe: bool = False
    previous: Annotated[dict[Name, _Holders], Field(max_length=MAX_NODES)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> PlacementInput:
        machines = self.each()
        names = Counter(machine.name for machine in machines if machine.name is not None)
        if names and (twice := names.most_common(1)[0])[1] > 1:
            raise ValueError(f"machines name {twice[0]!r} twice. Give each machine once")
        require_nested(machines)
        sized = self.checkpoint_bytes is not None or all(one.checkpoint_bytes is not None for one in machines)
        if not sized and any(machine.memory_bytes is not None for machine in machines):
            raise ValueError(
                "field checkpoint_bytes is missing. Needed with memory_bytes: what one machine's checkpoint takes"
            )
        return self

    def each(self) -> tuple[Machine, ...]:
        return (Machine(),) * self.machines if isinstance(self.machines, int) else self.machines


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """groups: indices of machines; a group with more of them than replicas is a ring, and then the strategy is "mixed".
    holders: the machines that hold each checkpoint, its own first. recovery_probability: by the number of machines lost
    at once; None if replicas lie outside of their groups.

    without_room: machine and holder of its group, for each replica that does not fit there: it lies on another machine,
    or nowhere; None if memory is not known. own_without_room: machines without room for their own checkpoint.

    fatal_domains: host, rack or island whose loss alone takes some checkpoint out of memory; None if none is named.
    moved: replicas that must be sent because the holder is new."""

    groups: tuple[Block, ...]
    strategy: str
    holders: tuple[Block, ...]
    recovery_probability: dict[str, float] | None
    fatal_domains: dict[str, list[str]] | None = None
    moved: int | None = None
    without_room: tuple[tuple[int, int], ...] | None = None
    own_without_room: tuple[int, ...] | None = None


def plan_placement(given: PlacementInput) -> PlacementPlan:
    """Place replicas within each island, or among all machines if islands do not matter or are too small. O(N log N).

    A replica lies elsewhere, or nowhere, if its holder's memory has no room. Raises BadInput, or NoFeasiblePlan if no
    replica fits anywhere."""
    machines, replicas = given.each(), given.replicas
    if replicas > len(machines):
        have = "1 machine" if len(machines) == 1 else f"{len(machines)} machines"
        raise BadInput(f"replicas = {replicas} needs as many machines; there are {have}. Lower it")
    domains = Domains(machines, replicas, given.site_safe)
    previous = None if given.previous is None else Previous(_names(machines), given.previous)
    blocks: list[Block] = []
    for pool in _pools(machines, replicas, given.site_safe):
        fresh = domains.blocks(pool)
        blocks += fresh if previous is None else adapt(pool, replicas, domains, previous, fresh)
    blocks = sorted((_from_smallest(block, replicas) for block in blocks), key=lambda b: (len(b) > replicas, b[0]))
    by_owner = {each[0]: each for block in blocks for each in held(block, replicas)}
    grouped = [by_owner[i] for i in range(len(machines))]
    holders = _with_room(given, machines, grouped)
    stays = holders == grouped
    probabilities = recovery_probabilities([len(block) for block in blocks], replicas) if stays else []
    return PlacementPlan(
        groups=tuple(blocks),
        strategy="mixed" if any(len(block) > replicas for block in blocks) else "group",
        holders=tuple(holders),
        recovery_probability={str(k): p for k, p in enumerate(probabilities, 1)} if stays else None,
        fatal_domains=_fatal(domains, holders, machines),
        moved=None if previous is None else sum(map(previous.moved, holders)),
        without_room=tuple((i, h) for i, each in enumerate(grouped) for h in each if h not in holders[i]) or None,
        own_without_room=tuple(_short(given, machines)) or None,
    )


def _with_room(given: PlacementInput, machines: Sequence[Machine], grouped: Sequence[Block]) -> list[Block]:
    """Return the holders of each machine's checkpoint, itself first, as far as memory has room for them."""
    if all(machine.memory_bytes is None for machine in machines):
        return list(grouped)
    room = [_UNLIMITED_BYTES if machine.memory_bytes is None else machine.memory_bytes for machine in machines]
    needed = [_needed(given, machine) for machine in machines]
    found = fitted([each[1:] for each in grouped], range(len(machines)), room, needed)
    if given.replicas > 1 and not any(found):
        i = max(range(len(machines)), key=lambda one: room[one] - needed[one])
        raise NoFeasiblePlan(
            f"no machine has room for a replica of another's checkpoint: {GENERATIONS} generations of one take "
            f"{min(needed)} bytes or more; machines[{i}] has {room[i]} free, of which its own take {needed[i]}. Free "
            "memory, or use more machines"
        )
    return [(i, *each) for i, each in enumerate(found)]


def _short(given: PlacementInput, machines: Sequence[Machine]) -> Iterator[int]:
    """Yield machines without room for their own checkpoint."""
    for i, machine in enumerate(machines):
        if machine.memory_bytes is not None and machine.memory_bytes < _needed(given, machine):
            yield i


def _needed(given: PlacementInput, machine: Machine) -> int:
    return GENERATIONS * (machine.checkpoint_bytes or given.checkpoint_bytes or 0)


def _names(machines: Sequence[Machine]) -> list[str]:
    names = []
    for i, machine in enumerate(machines):
        if machine.name is None:
            raise BadInput(f"machines[{i}].name is missing: previous says holders by name. Name every machine")
        names.append(machine.name)
    return names


def _pools(machines: Sequence[Machine], replicas: int, site_safe: bool) -> list[list[int]]:
    """Return the sets of machines that are placed separately: the islands. Islands with fewer machines than replicas
    form one set together, with the smallest that is large enough if need be."""
    if site_safe:
        return [list(range(len(machines)))]
    islands: defaultdict[str, list[int]] = defaultdict(list)
    for i, machine in enumerate(machines):
        islands[machine.island or ""].append(i)
    by_size = sorted(islands.values(), key=lambda pool: (len(pool), pool))
    small = [i for pool in by_size if len(pool) < replicas for i in pool]
    pools = [pool for pool in by_size if len(pool) >= replicas]
    if small and len(small) < replicas:
        small += pools.pop(0)
    return [sorted(small), *pools] if small else pools


def _from_smallest(block: Block, replicas: int) -> Block:
    """Return the block from its smallest machine on: a group has no order, and a ring may begin anywhere."""
    if len(block) == replicas:
        return tuple(sorted(block))
    at = block.index(min(block))
    return block[at:] + block[:at]


def _fatal(domains: Domains, holders: Sequence[Block], machines: Sequence[Machine]) -> dict[str, list[str]] | None:
    if all(each.host is each.rack is each.island is None for each in machines):
        return None
    found: dict[str, list[str]] = {"host": [], "rack": [], "island": []}
    for level, name in domains.fatal(holders):
        found[level].append(name)
    return found


def recovery_probabilities(block_sizes: Sequence[int], replicas: int) -> tuple[float, ...]:
    """Return the probabilities for k = 1 .. min(N, 2m) lost of N machines in all blocks; each set of k is equally
    probable.

    block_sizes: m for a group, whose members hold the replicas of all of them; m + 1 to 2m - 1 for a ring, whose
    members hold those of the m - 1 before them. replicas: m >= 1. Counted in whole numbers and divided once: no error
    but that of float64. Gemini (Wang et al., 2023) has a lower bound for k >= 2m, Corollary 6.1, and nothing for
    rings."""
    machines = sum(block_sizes)
    most = min(machines, 2 * replicas)
    rings = [size for size in block_sizes if size > replicas]
    survivable = _groups(len(block_sizes) - len(rings), replicas, most)
    for size in rings:
        ring = [_ring(size, replicas, k) for k in range(min(size, most) + 1)]
        survivable = [
            sum(ring[i] * survivable[k - i] for i in range(min(k, len(ring) - 1) + 1)) for k in range(most + 1)
        ]
    return tuple(survivable[k] / comb(machines, k) for k in range(1, most + 1))


def _groups(groups: int, m: int, most: int) -> list[int]:
    """Count the sets of k = 0 .. most machines that contain no whole group, by inclusion and exclusion over the
    groups."""
    return [
        sum((-1) ** j * comb(groups, j) * comb(m * (groups - j), k - m * j) for j in range(min(groups, k // m) + 1))
        for k in range(most + 1)
    ]


def _ring(size: int, m: int, k: int) -> int:
    """Count the sets of k machines of a ring in which no m are consecutive.

    With size < 2m a set has at most one such run, so each is counted once, by the start of its run: the machine before
    the start survives, m from there on are lost, the rest is free."""
    lost = 1 if k == size else size * comb(size - m - 1, k - m) if k >= m else 0
    return comb(size, k) - lost
