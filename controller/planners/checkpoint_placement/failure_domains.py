"""Group machines so that those of one group share as few failure domains as possible: hosts, racks, islands.

A block is a group (m machines, each holding a replica of all) or a ring (m + 1 to 2m - 1 machines, each holding the
replicas of the m - 1 before it). No two machines of a ring of that size are m apart in both directions. So, as in a
group, one of two machines always holds a replica of the other, and a block shares nothing if and only if its members
are all in distinct domains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeVar

from pydantic import Field

from atoll.planning.schemas import Bytes, Name, Schema

Block = tuple[int, ...]
"""Indices of machines, in the order of the ring."""
Sharing = tuple[int, int, int]
"""Numbers of replicas that share a host, a rack, an island with another replica of the same checkpoint. Compared in
this order."""
LEVELS: Final = ("host", "rack", "island")
Key = tuple[str, str | int]
T = TypeVar("T")


class Machine(Schema):
    """A machine. host, rack, island: names of domains that fail as one. A machine without a host or rack is its own;
    machines without an island form one.

    link_bps: bits a second that leave it. memory_bytes: free for checkpoints. checkpoint_bytes: size of its own
    checkpoint, if they differ."""

    name: Name | None = None
    host: Name | None = None
    rack: Name | None = None
    island: Name | None = None
    link_bps: Annotated[float, Field(ge=1, le=1e15)] | None = None
    memory_bytes: Annotated[int, Field(ge=0, le=2**60)] | None = None
    checkpoint_bytes: Bytes | None = None


def require_nested(machines: Sequence[Machine]) -> None:
    """Check that a host is in one rack and one island, and a rack in one island. Raises ValueError."""
    for inner, outer in (("host", "rack"), ("host", "island"), ("rack", "island")):
        found: dict[str, tuple[str | None, int]] = {}
        for i, machine in enumerate(machines):
            name, within = getattr(machine, inner), getattr(machine, outer)
            if name is None:
                continue
            other, first = found.setdefault(name, (within, i))
            if within != other:
                raise ValueError(
                    f"machines[{i}]: {inner} {name!r} has {outer} {within!r}, but {other!r} in machines[{first}]. "
                    f"A {inner} is in one {outer}: give each {inner} a name of its own"
                )


class Domains:
    """Failure domains of machines. site_safe: an island is a failure domain too."""

    def __init__(self, machines: Sequence[Machine], replicas: int, site_safe: bool) -> None:
        self._replicas = replicas
        self._levels = len(LEVELS) if site_safe else len(LEVELS) - 1
        self._link_bps = [math.inf if each.link_bps is None else each.link_bps for each in machines]
        self._keys = [_keys(i, each) for i, each in enumerate(machines)]
        self._shared = [  # levels on which anything can be shared
            level for level in range(self._levels) if len({keys[level] for keys in self._keys}) < len(machines)
        ]

    def blocks(self, pool: Sequence[int]) -> list[Block]:
        """Group the pool, at least m machines, into groups of m and, if some are left over, one ring, which comes last.

        Consecutive machines, the fastest links first, if that shares nothing. Otherwise domains are dealt out."""
        m = self._replicas
        order = sorted(pool, key=lambda i: (-self._link_bps[i], i))
        groups = len(pool) // m
        whole = groups - 1 if len(pool) % m else groups
        found = [tuple(order[m * g : m * g + m]) for g in range(whole)]
        if whole < groups:
            found.append(tuple(order[m * whole :]))
        return found if self.sharing(found) == (0, 0, 0) else self._dealt(order)

    def _dealt(self, order: Sequence[int]) -> list[Block]:
        """Deal out domains like cards, each as a run of machines.

        A domain with no more machines than blocks gets no two in one block. A larger one gets as equal a number in each
        as possible. Runs lie within runs, so this holds on all levels at once."""
        m, over = self._replicas, len(order) % self._replicas
        ring = self._spread(order, m + over) if over else ()
        taken = set(ring)
        left = sorted((i for i in order if i not in taken), key=self._run)
        groups = len(left) // m
        return [tuple(left[g::groups]) for g in range(groups)] + ([ring] if ring else [])

    def _run(self, i: int) -> tuple[object, ...]:
        return (*reversed(self._keys[i][: self._levels]), -self._link_bps[i], i)

    def _spread(self, order: Sequence[int], count: int) -> Block:
        """Choose the members of the ring: from as many domains as there are, the largest first, so that the rest can be
        dealt out too."""
        left = list(order)
        size = [Counter(self._keys[i][level] for i in left) for level in range(self._levels)]
        used: list[Counter[Key]] = [Counter() for _ in range(self._levels)]
        ring: list[int] = []
        for _ in range(count):
            best = min(
                left,
                key=lambda i: (
                    [used[level][self._keys[i][level]] for level in range(self._levels)],
                    [-size[level][self._keys[i][level]] for level in reversed(range(self._levels))],
                ),
            )
            left.remove(best)
            ring.append(best)
            for level in range(self._levels):
                used[level][self._keys[best][level]] += 1
                size[level][self._keys[best][level]] -= 1
        return tuple(ring)

    def sharing(self, blocks: Sequence[Block]) -> Sharing:
        found = [0, 0, 0]
        for block in blocks:
            for level in self._shared:
                names = [self._keys[i][level] for i in block]
                if len(set(names)) < len(names):
                    found[level] += sum(self._replicas - len(set(holders)) for holders in held(names, self._replicas))
        return found[0], found[1], found[2]

    def separable(self, block: Block, other: Block) -> bool:
        """Return whether one exchange reduces what the block shares on the widest level, without increasing it in the
        other."""
        for level in reversed(self._shared):
            mine = Counter(self._keys[i][level] for i in block)
            if len(mine) < len(block):
                theirs = {self._keys[i][level] for i in other}
                return bool(theirs - mine.keys()) and any(n > 1 and key not in theirs for key, n in mine.items())
        return False

    def fatal(self, holders: Sequence[Sequence[int]]) -> Iterator[tuple[str, str]]:
        """Yield level and name of every domain whose loss alone takes all replicas of some checkpoint. holders: one
        block a checkpoint."""
        for level, what in enumerate(LEVELS):
            found = [{self._keys[i][level] for i in each} for each in holders]
            names = {str(name) for keys in found if len(keys) == 1 for kind, name in keys if kind == what}
            yield from ((what, name) for name in sorted(names))


def _keys(i: int, machine: Machine) -> tuple[Key, Key, Key]:
    """Return the machine's domains. An unnamed domain is replaced by the smaller one within it, so that runs lie within
    runs."""
    host: Key = ("machine", i) if machine.host is None else ("host", machine.host)
    rack = host if machine.rack is None else ("rack", machine.rack)
    return host, rack, rack if machine.island is None else ("island", machine.island)


def held(block: Sequence[T], replicas: int) -> Iterator[tuple[T, ...]]:
    """Yield, for each member of a block, the holders of its replicas: the member and those after it."""
    for at in range(len(block)):
        yield tuple(block[(at + j) % len(block)] for j in range(replicas))
