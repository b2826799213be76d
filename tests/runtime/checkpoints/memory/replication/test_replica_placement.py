from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.checkpoints.memory.replication.replica_placement import (
    ReplicaPlacement,
    holders,
    owners,
)
from atoll.planning.replica_room import fitted


def test_each_node_hands_its_shards_to_the_next_one() -> None:
    assert holders(["a", "b", "c"], [(1,), (2,), (0,)]) == [(1,), (2,), (0,)]
    assert holders(["a", "b", "c"], [(1, 2), (2, 0), (0, 1)]) == [(1, 2), (2, 0), (0, 1)]
    assert holders(["a", "a", "b", "b"], [(1,), (1,), (0,), (0,)]) == [(2,), (3,), (0,), (1,)]
    assert holders(["a", "a", "b"], [(1,), (1,), (0,)]) == [(2,), (2,), (0,)]


def test_one_machine_alone_keeps_its_own_and_no_replicas_means_none() -> None:
    assert holders(["a", "a"], [(), ()]) == [(), ()]
    assert holders(["a", "b"], [(), ()]) == [(), ()]
    assert holders([], []) == []


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_copies_are_on_the_nodes_that_were_named_each_on_one_of_their_ranks(nodes: list[str], random: Random) -> None:
    order = list(dict.fromkeys(nodes))
    others = {node: [at for at, other in enumerate(order) if other != node] for node in order}
    chosen = {node: tuple(random.sample(there, random.randint(0, len(there)))) for node, there in others.items()}
    placed = holders(nodes, [chosen[node] for node in nodes])
    for rank, ranks in enumerate(placed):
        assert [nodes[other] for other in ranks] == [order[at] for at in chosen[nodes[rank]]]
        assert all(rank in owners(placed, other) for other in ranks)
    for node in set(nodes):
        own = {rank for rank, at in enumerate(nodes) if at == node}
        assert ReplicaPlacement(min(own), tuple(nodes), tuple(placed)).here == own | {
            o for rank in own for o in owners(placed, rank)
        }


def test_a_copy_that_does_not_fit_lies_where_there_is_room() -> None:
    """1. Machine b has room for its own state alone. 2. For all, nothing was kept in memory any more. 3. Now the copy
    that was to lie there lies on the machine with the most room that has none of it."""
    nodes, ring = ("a", "b", "c", "d"), ((1,), (2,), (3,), (0,))
    assert fitted(ring, nodes, [40, 40, 40, 40], [10] * 4) == list(ring)
    assert fitted(ring, nodes, [40, 15, 40, 70], [10] * 4) == [(3,), (2,), (3,), (0,)]
    assert fitted(ring, nodes, [40, 15, 15, 10], [10] * 4) == [(), (0,), (0,), (0,)], "one has no place"
    assert fitted(((1, 2), (2, 0), (0, 1)), nodes[:3], [30, 10, 30], [10] * 3) == [(2,), (2, 0), (0,)]
    placement = ReplicaPlacement(0, nodes, ring)
    found, said = placement.fitted([40, 15, 40, 70], [10] * 4)
    assert (found.holders, found.owners, found.here) == ((3,), (3,), {0, 3})
    assert said == [
        "the copy of rank 0's state (10 Bytes) does not fit on b, where rank 1 has 15 Bytes, and lies on d instead"
    ]


@given(st.data(), st.integers(2, 8))
def test_nothing_lies_where_it_does_not_fit_nor_twice_on_a_machine(data: st.DataObject, ranks: int) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abcd"), min_size=ranks, max_size=ranks))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    rooms = [size + data.draw(st.integers(0, 30)) for size in sizes]
    held_by = []
    for owner in range(ranks):
        others = sorted({nodes.index(node) for node in nodes if node != nodes[owner]})
        held_by.append(tuple(data.draw(st.lists(st.sampled_from(others), unique=True)) if others else ()))
    found = fitted(held_by, nodes, rooms, sizes)
    taken = [sizes[rank] + sum(sizes[owner] for owner in owners(found, rank)) for rank in range(ranks)]
    assert all(used <= room for used, room in zip(taken, rooms, strict=True))
    for owner, (before, after) in enumerate(zip(held_by, found, strict=True)):
        machines = [nodes[rank] for rank in (owner, *after)]
        assert len(machines) == len(set(machines))
        assert len(after) <= len(before)
