from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.jobs.model.replica_placement import first_placement, holders, is_same, shared_hosts, without_room
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import JobLearned, NodeRecord, PlanRecord, RunMember
from atoll.errors import NoFeasiblePlan
from atoll.jobs.job_spec import Checkpoint

SEAT = RunMember(rank=0, node="a", device=0, node_rank=0, local_rank=0, local_world_size=1)
TWO = Checkpoint(memory_replicas=2)


def node(name: str, island: str = "here", rack: str = "", host: str = "") -> NodeRecord:
    return NodeRecord(
        name=name, island=island, address=name, memory_bytes=1, devices=(), version="0", host=host, rack=rack
    )


def placed(
    *nodes: NodeRecord, wanted: Checkpoint = TWO, before: PlanRecord | None = None, devices: int = 1
) -> PlanRecord | None:
    members = [
        RunMember(
            rank=i, node=n.name, device=i, node_rank=i // devices, local_rank=i % devices, local_world_size=devices
        )
        for i, n in enumerate(n for n in nodes for _ in range(devices))
    ]
    return first_placement(1, members, {n.name: n for n in nodes}, wanted, before=before)


def kept(plan: PlanRecord | None, *nodes: NodeRecord) -> dict[str, list[str]]:
    """By node, who keeps copies of its state."""
    assert plan is not None
    return {n.name: [nodes[at].name for at in each] for n, each in zip(nodes, holders(plan.output), strict=True)}


def test_agents_on_one_host_never_keep_each_others_copies_where_there_are_other_hosts() -> None:
    nodes = (node("a", host="x"), node("b", host="x"), node("c", host="y"), node("d", host="y"))
    plan = placed(*nodes, devices=2)
    assert plan is not None
    assert kept(plan, *nodes) == {"a": ["c"], "b": ["d"], "c": ["a"], "d": ["b"]}
    assert shared_hosts(plan) == ()
    assert plan.reason == "state is copied between a + c, b + d"
    assert PLANNERS["placement"].run_json(plan.input) == plan.output


def test_where_all_are_on_one_host_it_is_named() -> None:
    plan = placed(node("a", host="x"), node("b", host="x"))
    assert plan is not None
    assert shared_hosts(plan) == ("a",)
    assert shared_hosts(placed(node("a"), node("b")) or plan) == ()  # older agents do not tell


def test_copies_stay_in_the_island_unless_its_loss_is_to_lose_nothing() -> None:
    nodes = (node("a", "lyon"), node("b", "oslo"), node("c", "lyon"), node("d", "oslo"))
    assert kept(placed(*nodes), *nodes) == {"a": ["c"], "c": ["a"], "b": ["d"], "d": ["b"]}
    safe = kept(placed(*nodes, wanted=TWO.model_copy(update={"site_safe": True})), *nodes)
    islands = {n.name: n.island for n in nodes}
    assert all(islands[owner] != islands[other] for owner, others in safe.items() for other in others)


def test_racks_and_hosts_of_the_same_name_in_two_islands_are_two() -> None:
    nodes = [node(f"{island}-{i}", island, f"r{i}", "container-host") for island in ("lyon", "oslo") for i in (0, 1)]
    assert kept(placed(*nodes), *nodes)["lyon-0"] == ["lyon-1"]


def test_a_standby_in_the_place_of_a_lost_one_leaves_all_other_copies_where_they_are() -> None:
    before = (node("a"), node("b"), node("c"), node("d"))
    first = placed(*before)
    after = (node("a"), node("e"), node("c"), node("d"))
    plan = placed(*after, before=first)
    assert kept(first, *before) == {"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"]}
    assert kept(plan, *after) == {"a": ["e"], "e": ["a"], "c": ["d"], "d": ["c"]}
    assert plan is not None
    assert first is not None
    assert plan.reason.endswith("; 2 moved")
    assert not is_same(first, plan)
    again = placed(*before, before=first)
    assert again is not None
    assert is_same(first, again)


def test_nothing_is_placed_for_one_machine_or_without_copies() -> None:
    assert placed(node("a"), devices=4) is None
    assert placed(node("a"), node("b"), wanted=Checkpoint(memory_replicas=1)) is None
    three = placed(node("a"), node("b"), wanted=Checkpoint(memory_replicas=3))
    assert three is not None
    assert json.loads(three.input)["replicas"] == 2, "as many as there are machines"


@settings(max_examples=40, deadline=None)
@given(
    runs=st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=8), min_size=2, max_size=4),
    replicas=st.integers(0, 4),
    safe=st.booleans(),
)
def test_whoever_comes_and_goes_every_state_has_its_copies_elsewhere(
    runs: list[set[str]], replicas: int, safe: bool
) -> None:
    wanted = Checkpoint(memory_replicas=replicas, site_safe=safe)
    before = None
    for names in runs:
        nodes = [node(n, "lyon" if n < "d" else "oslo", host=f"h{ord(n) // 2}") for n in sorted(names)]
        before = placed(*nodes, wanted=wanted, before=before)
        copies = max(min(replicas, len(nodes)) - 1, 0)
        if before is None:
            assert copies == 0
        else:
            found = kept(before, *nodes)
            assert all(len(set(others) - {owner}) == copies for owner, others in found.items())


def test_what_cannot_fit_is_known_before_the_run_begins() -> None:
    """1. Run 1 told how large its state is, the agents what memory they have. 2. Run 2 was placed without either. 3.
    Now the short machines keep nobody's copy, an event says where it went, and the input says why."""
    nodes = tuple(
        replace(node(name), checkpoint_memory_bytes=room)
        for name, room in (("a", 500 << 20), ("b", 150 << 20), ("c", 500 << 20), ("d", 50 << 20))
    )
    members = [replace(SEAT, rank=i, node=n.name) for i, n in enumerate(nodes)]
    by_name, learned = {n.name: n for n in nodes}, JobLearned(shared_bytes=40 << 20, own_bytes=40 << 20)
    blind = first_placement(2, members, by_name, TWO)
    assert blind is not None
    assert list(without_room(blind)) == []
    plan = first_placement(2, members, by_name, TWO, learned=learned)
    assert plan is not None
    assert kept(plan, *nodes) == {"a": ["c"], "b": ["a"], "c": ["a"], "d": ["c"]}
    of_b, of_d = (f"(104.9 MB); for checkpoints it has {room} MB" for room in (157.3, 52.4))
    assert list(without_room(plan)) == [
        f"the memory of d has no room for its own checkpoints {of_d}: they go to its disk",
        f"the memory of b has no room for a copy of a's checkpoints {of_b}: it lies elsewhere",
        f"the memory of d has no room for a copy of c's checkpoints {of_d}: it lies elsewhere",
    ]
    assert PLANNERS["placement"].run_json(plan.input) == plan.output
    small = {name: replace(one, checkpoint_memory_bytes=150 << 20) for name, one in by_name.items()}
    with pytest.raises(NoFeasiblePlan, match="no machine has room for a replica"):
        first_placement(2, members, small, TWO, learned=learned)
