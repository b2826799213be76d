"""Chooses whose CPU memory holds the replicas of whose checkpoint.

Source: Gemini (Wang et al., 2023), Algorithm 6.1: groups of m consecutive machines that hold each other's replicas;
where m does not divide N, the last group takes the rest and is a ring. Failure domains, islands, links, and changes
that move little are ours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Discriminator, Field, Tag, model_validator

from atoll.controller.planners.failure_domains import Block, Domains, Machine, held, require_nested
from atoll.controller.planners.recovery_probability import recovery_probabilities
from atoll.controller.planners.replacing import Previous, adapt
from atoll.controller.planners.schemas import MAX_NODES, Bytes, Name, Schema
from atoll.errors import BadInput, NoFeasiblePlan

MAX_REPLICAS: Final = 1000
GENERATIONS: Final = 2
"""Of every replica: the last complete checkpoint and the one being written."""


_Holders = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_REPLICAS)]


class PlacementInput(Schema):
    """machines: as they are, or how many there are. replicas: of each machine's checkpoint, its own included.
    checkpoint_bytes: of one machine, where known. site_safe: replicas on different islands, not within one. previous:
    by machine's name, the names of its holders."""

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
        if self.checkpoint_bytes is None and any(machine.memory_bytes is not None for machine in machines):
            raise ValueError(
                "field checkpoint_bytes is missing. Needed with memory_bytes: what one machine's checkpoint takes"
            )
        return self

    def each(self) -> tuple[Machine, ...]:
        return (Machine(),) * self.machines if isinstance(self.machines, int) else self.machines


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """groups: machines by index; more of them than replicas are a ring, and then the strategy is "mixed". holders: of
    each machine's checkpoint, itself first. recovery_probability: by the number of machines lost at once.

    fatal_domains: host, rack or island whose loss alone takes some checkpoint out of memory; None where none is named.
    replication_s: of each group, from a step's end until all its replicas are sent, with nothing else on the links;
    None where link or size are not known. moved: replicas to be sent that were not there before, between machines.
    """

    groups: tuple[Block, ...]
    strategy: str
    holders: tuple[Block, ...]
    recovery_probability: dict[str, float]
    fatal_domains: dict[str, list[str]] | None = None
    replication_s: tuple[float | None, ...] | None = None
    moved: int | None = None


def plan_placement(given: PlacementInput) -> PlacementPlan:
    """Blocks of each island, or of all machines where islands do not matter or are too small. O(N log N).

    Raises BadInput, or NoFeasiblePlan where the replicas do not fit the free memory.
    """
    machines, replicas = given.each(), given.replicas
    if replicas > len(machines):
        have = "1 machine" if len(machines) == 1 else f"{len(machines)} machines"
        raise BadInput(f"replicas = {replicas} needs as many machines; there are {have}. Lower it")
    _require_memory(given, machines)
    domains = Domains(machines, replicas, given.site_safe)
    previous = None if given.previous is None else Previous(_names(machines), given.previous)
    blocks: list[Block] = []
    for pool in _pools(machines, replicas, given.site_safe):
        fresh = domains.blocks(pool)
        blocks += fresh if previous is None else adapt(pool, replicas, domains, previous, fresh)
    blocks = sorted((_from_smallest(block, replicas) for block in blocks), key=lambda b: (len(b) > replicas, b[0]))
    holders = {each[0]: each for block in blocks for each in held(block, replicas)}
    probabilities = recovery_probabilities([len(block) for block in blocks], replicas)
    return PlacementPlan(
        groups=tuple(blocks),
        strategy="mixed" if any(len(block) > replicas for block in blocks) else "group",
        holders=tuple(holders[i] for i in range(len(machines))),
        recovery_probability={str(k): p for k, p in enumerate(probabilities, 1)},
        fatal_domains=_fatal(domains, blocks, machines),
        replication_s=_replication_s(given, machines, blocks),
        moved=None if previous is None else sum(map(previous.moved, holders.values())),
    )


def _require_memory(given: PlacementInput, machines: Sequence[Machine]) -> None:
    """Every machine holds as many replicas as there are of its own checkpoint, in groups and in rings."""
    if given.checkpoint_bytes is None:
        return
    one = GENERATIONS * given.checkpoint_bytes
    short = [
        (m.memory_bytes, i)
        for i, m in enumerate(machines)
        if m.memory_bytes is not None and m.memory_bytes < one * given.replicas
    ]
    if short:
        free, i = min(short)
        raise NoFeasiblePlan(
            f"{given.replicas} replicas in {GENERATIONS} generations of {given.checkpoint_bytes} bytes take "
            f"{one * given.replicas} bytes of every machine; machines[{i}] has {free} free, and {len(short)} of "
            f"{len(machines)} have too little. At most {free // one} replicas fit: lower replicas or free memory"
        )


def _names(machines: Sequence[Machine]) -> list[str]:
    names = []
    for i, machine in enumerate(machines):
        if machine.name is None:
            raise BadInput(f"machines[{i}].name is missing: previous says holders by name. Name every machine")
        names.append(machine.name)
    return names


def _pools(machines: Sequence[Machine], replicas: int, site_safe: bool) -> list[list[int]]:
    """Machines that are placed among one another: the islands. Those with fewer machines than replicas are one
    together, with the smallest that is large enough if need be."""
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
    """A group's order says nothing, a ring may begin anywhere."""
    if len(block) == replicas:
        return tuple(sorted(block))
    at = block.index(min(block))
    return block[at:] + block[:at]


def _fatal(domains: Domains, blocks: Sequence[Block], machines: Sequence[Machine]) -> dict[str, list[str]] | None:
    if all(each.host is each.rack is each.island is None for each in machines):
        return None
    found: dict[str, list[str]] = {"host": [], "rack": [], "island": []}
    for level, name in domains.fatal(blocks):
        found[level].append(name)
    return found


def _replication_s(
    given: PlacementInput, machines: Sequence[Machine], blocks: Sequence[Block]
) -> tuple[float | None, ...] | None:
    """Each sends one replica and receives one for every other one there is; the slowest link of a block decides."""
    if given.checkpoint_bytes is None or all(machine.link_bps is None for machine in machines):
        return None
    bits = 8 * given.checkpoint_bytes * (given.replicas - 1)
    rates = [[machines[i].link_bps for i in block] for block in blocks]
    known = [[rate for rate in block if rate is not None] for block in rates]
    return tuple(bits / min(k) if len(k) == len(r) else None for k, r in zip(known, rates, strict=True))
