"""Routing as pure tables: every message reaches every rank that it is for exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.transport.frames import Kind
from atoll.agent.runtime.transport.topology import Member, Topology, members_of
from atoll.errors import BadInput


@st.composite
def runs(draw: st.DrawFn) -> list[Topology]:
    islands = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    members = members_of([f"node{rank}" for rank in range(len(islands))], [str(island) for island in islands])
    return [Topology.of(rank, members) for rank in range(len(members))]


def spread(run: list[Topology], kind: Kind, start: int, origin: int) -> Counter[int]:
    """Whom a message of `start` reaches, how often. Every receiver must accept it from whoever brought it."""
    reached: Counter[int] = Counter()
    moving = [(start, to) for to in run[start].routes(kind)]
    while moving:
        sender, to = moving.pop()
        assert sum(reached.values()) < 1000, "it goes round in circles"
        assert to in run[sender].peers
        assert sender in run[to].peers
        assert run[to].accepts(kind, origin, sender)
        reached[to] += 1
        moving += [(to, further) for further in run[to].relays(kind, sender)]
    return reached


@given(runs())
def test_a_broadcast_reaches_every_other_rank_exactly_once(run: list[Topology]) -> None:
    for kind in (Kind.CONTROL, Kind.DIGEST, Kind.GOODBYE):
        for start in range(len(run)):
            assert spread(run, kind, start, start) == Counter(set(range(len(run))) - {start})


@given(runs())
def test_a_part_reaches_every_mate_exactly_once(run: list[Topology]) -> None:
    for me in run:
        mates = [t.me.rank for t in run if t.me.island == me.me.island and t is not me]
        assert spread(run, Kind.PART, me.me.rank, me.me.rank) == Counter(mates)


@given(runs())
def test_a_sum_reaches_every_rank_of_the_other_islands_exactly_once(run: list[Topology]) -> None:
    for leader in (t for t in run if t.me.leader):
        others = [t.me.rank for t in run if t.me.island != leader.me.island]
        assert spread(run, Kind.SUM, leader.me.rank, leader.me.island) == Counter(others)


@given(runs(), st.data())
def test_nobody_speaks_for_another(run: list[Topology], data: st.DataObject) -> None:
    """A mate that does not lead speaks for itself alone; another island's leader for that island alone."""
    me = data.draw(st.sampled_from([t for t in run if t.peers] or run))
    for sender in me.peers:
        there = run[sender].me
        for origin in range(len(run) + 3):
            known = origin < len(run)
            for kind in (Kind.CONTROL, Kind.DIGEST, Kind.GOODBYE):
                if me.accepts(kind, origin, sender) and origin != sender:
                    assert known
                    assert origin != me.me.rank
                    assert run[origin].me.island != me.me.island
                    assert sender == me.my_leader or run[origin].me.island == there.island
            assert me.accepts(Kind.PART, origin, sender) == (sender in me.mates and origin == sender)
            for kind in (Kind.HELLO, Kind.DIRECT):
                assert me.accepts(kind, origin, sender) == (origin == sender)
                assert me.relays(kind, sender) == ()
            if me.accepts(Kind.SUM, origin, sender):
                assert origin != me.me.island
                assert origin < me.islands
                assert there.leader


def test_two_islands_of_two() -> None:
    members = members_of(["n0", "n0", "n1", "n2"], ["west", "west", "east", "east"])
    assert [(m.rank, m.island, m.leader) for m in members] == [
        (0, 0, True),
        (1, 0, False),
        (2, 1, True),
        (3, 1, False),
    ]
    leader, mate = Topology.of(0, members), Topology.of(1, members)
    assert (leader.peers, mate.peers) == ((1, 2), (0,))
    assert leader.relays(Kind.SUM, sender=2) == (1,)
    assert leader.relays(Kind.CONTROL, sender=1) == (2,)
    assert mate.relays(Kind.CONTROL, sender=0) == ()


def test_members_that_do_not_fit_together_are_refused() -> None:
    def member(rank: int, island: int, leader: bool) -> Member:
        return Member(rank=rank, island=island, node="n", leader=leader)

    with pytest.raises(BadInput, match=r"listed by rank 0, 1, \.\.\., not \[1\]"):
        Topology.of(0, [member(1, 0, True)])
    with pytest.raises(BadInput, match="rank 1 on node n of island 0: the lowest rank of an island leads it"):
        Topology.of(0, [member(0, 0, True), member(1, 0, True)])
    with pytest.raises(BadInput, match=r"islands must be numbered 0, 1, \.\.\., not \[0, 2\]"):
        Topology.of(0, [member(0, 0, True), member(1, 2, True)])
