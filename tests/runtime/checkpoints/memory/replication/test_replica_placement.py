from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.checkpoints.memory.replication.replica_placement import holders, on_node, owners


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
        assert on_node(nodes, placed, node) == own | {o for rank in own for o in owners(placed, rank)}
