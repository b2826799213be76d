from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.memory.placement import holders, on_node, owners


def test_each_node_hands_its_shards_to_the_next_one() -> None:
    assert holders(["a", "b", "c"], 2) == [(1,), (2,), (0,)]
    assert holders(["a", "b", "c"], 3) == [(1, 2), (2, 0), (0, 1)]
    assert holders(["a", "a", "b", "b"], 2) == [(2,), (3,), (0,), (1,)]


def test_one_machine_alone_keeps_its_own_and_no_replicas_means_none() -> None:
    assert holders(["a", "a"], 2) == [(), ()]
    assert holders(["a", "b"], 1) == [(), ()]
    assert holders([], 2) == []


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), st.integers(1, 6))
def test_copies_are_on_other_nodes_each_on_one_of_its_own(nodes: list[str], replicas: int) -> None:
    placed = holders(nodes, replicas)
    for rank, ranks in enumerate(placed):
        there = [nodes[other] for other in ranks]
        assert len(set(there)) == len(there) == min(replicas, len(set(nodes))) - 1
        assert nodes[rank] not in there
        assert all(rank in owners(placed, other) for other in ranks)
    for node in set(nodes):
        own = {rank for rank, at in enumerate(nodes) if at == node}
        assert on_node(nodes, placed, node) == own | {o for rank in own for o in owners(placed, rank)}
