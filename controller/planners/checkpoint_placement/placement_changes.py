"""Change a placement after machines joined or left, with as few replicas sent anew as possible.

Groups and rings that are still whole stay. Fragments of the others and new machines are combined so that machines that
held each other's replicas stay together. Then exchanges of two machines improve the result."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from atoll.controller.planners.checkpoint_placement.failure_domains import Block, Domains, Sharing, held

MAX_TRIED: Final = 1000
"""Exchanges that are tried, some 20 microseconds each. If many machines change at once, most of their replicas move in
any case."""
MAX_COMPARED: Final = 50_000
"""Pairs of blocks, a microsecond or two each, that are searched for an exchange that separates domains."""

Cost = tuple[int, int, int, int]
"""Numbers of replicas that share a host, a rack, an island, then of those that move: compared in this order."""


class Previous:
    """Previous holders, by the indices of the machines that are there now."""

    def __init__(self, names: Sequence[str], previous: Mapping[str, tuple[str, ...]]) -> None:
        index = {name: i for i, name in enumerate(names)}
        self._holders = {
            index[owner]: tuple(index[name] for name in kept if name in index)
            for owner, kept in previous.items()
            if owner in index
        }
        components = (sorted(index[n] for n in names if n in index) for names in _components(previous))
        fragments = [self._in_ring_order(members) for members in components if members]
        known = {i for fragment in fragments for i in fragment}
        self.fragments = sorted(fragments) + [(i,) for i in range(len(names)) if i not in known]
        """Remaining machines of each block, and each new machine alone."""

    def moved(self, holders: Sequence[int]) -> int:
        """Count the replicas of the first machine that the others do not have yet."""
        had = self._holders.get(holders[0], ())
        return sum(i not in had for i in holders[1:])

    def _in_ring_order(self, members: Sequence[int]) -> Block:
        left, at = set(members), members[0]
        order = [at]
        left.remove(at)
        while left:
            at = next((i for i in self._holders.get(at, ()) if i in left), min(left))
            order.append(at)
            left.remove(at)
        return tuple(order)


def adapt(
    pool: Sequence[int], replicas: int, domains: Domains, previous: Previous, fresh: Sequence[Block]
) -> list[Block]:
    """Return blocks of the pool in the sizes of `fresh`, or `fresh` itself if keeping blocks would share more than it
    does."""
    inside = set(pool)
    fragments = [found for f in previous.fragments if (found := tuple(i for i in f if i in inside))]
    ring_size = max(len(block) for block in fresh)
    kept: list[Block] = []
    loose: list[Block] = []
    for fragment in fragments:
        stays = not any(map(previous.moved, held(fragment, replicas)))
        if stays and (len(fragment) == replicas or (len(fragment) == ring_size and not _has_ring(kept, replicas))):
            kept.append(fragment)
        else:
            loose.append(fragment)
    if ring_size > replicas and not _has_ring(kept, replicas) and sum(map(len, loose)) < ring_size:
        loose_members = tuple(i for fragment in loose for i in fragment)
        released = min(kept, key=lambda block: (domains.sharing([block + loose_members]), block))
        kept.remove(released)
        loose.append(released)
    missing = Counter(map(len, fresh))
    missing.subtract(map(len, kept))
    sizes = sorted(missing.elements())
    exchange = _Exchange([*_fill(loose, sizes), *kept], replicas, domains, previous)
    exchange.improve(len(sizes))
    exchange.separate(len(sizes), domains.sharing(fresh))
    changed = _Exchange(fresh, replicas, domains, previous)
    return exchange.blocks if exchange.total() <= changed.total() else list(fresh)


def _components(previous: Mapping[str, tuple[str, ...]]) -> Iterator[set[str]]:
    """Yield sets of machines that hold for one another, directly or through others: one set for each block there
    was."""
    neighbours: dict[str, set[str]] = {}
    for owner, holders in sorted(previous.items()):
        for name in (owner, *holders):
            neighbours.setdefault(name, set()).add(owner)
            neighbours[owner].add(name)
    seen: set[str] = set()
    for start in neighbours:
        if start in seen:
            continue
        found, todo = {start}, deque([start])
        while todo:
            new = neighbours[todo.popleft()] - found
            found |= new
            todo.extend(new)
        seen |= found
        yield found


def _has_ring(blocks: Sequence[Block], replicas: int) -> bool:
    return any(len(block) > replicas for block in blocks)


def _fill(fragments: Sequence[Block], sizes: Sequence[int]) -> list[Block]:
    """Fill blocks of these sizes: the largest fragment first, into the block that it leaves least room in. Cut a
    fragment only if it fits in none."""
    blocks: list[list[int]] = [[] for _ in sizes]
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    for b, size in reversed(list(enumerate(sizes))):
        by_room[size].append(b)
    todo = [(-len(fragment), fragment) for fragment in fragments]
    heapq.heapify(todo)
    while todo:
        _, fragment = heapq.heappop(todo)
        rooms = [room for room, found in by_room.items() if found]
        room = min((room for room in rooms if room >= len(fragment)), default=max(rooms))
        b = by_room[room].pop()
        blocks[b] += fragment[:room]
        if len(fragment) < room:
            by_room[room - len(fragment)].append(b)
        elif rest := fragment[room:]:
            heapq.heappush(todo, (-len(rest), rest))
    return [tuple(block) for block in blocks]


class _Exchange:
    """Blocks and the cost of each, improved by exchanging two machines as long as that reduces the cost."""

    def __init__(self, blocks: Sequence[Block], replicas: int, domains: Domains, previous: Previous) -> None:
        self._replicas, self._domains, self._previous = replicas, domains, previous
        self.blocks = list(blocks)
        self._costs = [self._cost(block) for block in blocks]

    def total(self) -> Cost:
        return _sum(self._costs)

    def improve(self, first: int) -> None:
        """Exchange machines among the first so many blocks."""
        tried, again = 0, True
        while again and tried < MAX_TRIED:
            again = False
            for a, b in itertools.combinations_with_replacement(range(first), 2):
                tried += len(self.blocks[a]) * len(self.blocks[b])
                if tried >= MAX_TRIED:
                    break
                again |= self._between(a, b)

    def separate(self, first: int, goal: Sharing) -> None:
        """Exchange machines of the first so many blocks that share a domain with any others, until no more is shared
        than the goal allows."""
        pairs = itertools.product(range(first), range(len(self.blocks)))
        for a, b in itertools.islice(pairs, MAX_COMPARED):
            if b == 0 and self.total()[:3] <= goal:
                return
            if self._costs[a][:3] != (0, 0, 0) and self._domains.separable(self.blocks[a], self.blocks[b]):
                self._between(a, b)

    def _between(self, a: int, b: int) -> bool:
        return any(
            self._exchanged(a, i, b, j)
            for i in range(len(self.blocks[a]))
            for j in range(i + 1 if a == b else 0, len(self.blocks[b]))
        )

    def _exchanged(self, a: int, i: int, b: int, j: int) -> bool:
        """Exchange two machines if that is cheaper; return whether it was."""
        one, other = list(self.blocks[a]), list(self.blocks[b])
        if a == b:
            other = one
        one[i], other[j] = other[j], one[i]
        changed = {a: tuple(one), b: tuple(other)}
        costs = {at: self._cost(block) for at, block in changed.items()}
        if _sum(list(costs.values())) >= _sum([self._costs[at] for at in changed]):
            return False
        for at, block in changed.items():
            self.blocks[at], self._costs[at] = block, costs[at]
        return True

    def _cost(self, block: Block) -> Cost:
        return (*self._domains.sharing([block]), sum(map(self._previous.moved, held(block, self._replicas))))


def _sum(costs: Sequence[Cost]) -> Cost:
    host, rack, island, moved = (sum(column) for column in zip(*costs, strict=True)) if costs else (0, 0, 0, 0)
    return host, rack, island, moved
