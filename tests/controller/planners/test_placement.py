from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput, NoFeasiblePlan


def plan(machines: Any, replicas: int, **more: Any) -> Any:
    return json.loads(PLANNERS["placement"].run_json(json.dumps({"machines": machines, "replicas": replicas} | more)))


@pytest.mark.parametrize(
    ("machines", "replicas", "lost", "probability"),
    [(16, 2, 2, 14 / 15), (16, 2, 3, 0.8), (5, 2, 2, 0.6), (7, 3, 3, 30 / 35), (12, 3, 4, 459 / 495)],
)
def test_the_papers_examples(machines: int, replicas: int, lost: int, probability: float) -> None:
    found = plan(machines, replicas)
    assert found["recovery_probability"][str(lost)] == pytest.approx(probability, rel=1e-15)
    assert list(found) == ["groups", "holders", "recovery_probability", "strategy"]


def test_groups_are_consecutive_and_the_last_takes_the_rest_as_a_ring() -> None:
    assert plan(4, 2) == {
        "groups": [[0, 1], [2, 3]],
        "holders": [[0, 1], [1, 0], [2, 3], [3, 2]],
        "recovery_probability": {"1": 1.0, "2": pytest.approx(2 / 3), "3": 0.0, "4": 0.0},
        "strategy": "group",
    }
    mixed = plan(5, 2)
    assert (mixed["groups"], mixed["strategy"]) == ([[0, 1], [2, 3, 4]], "mixed")
    assert mixed["holders"] == [[0, 1], [1, 0], [2, 3], [3, 4], [4, 2]]


def require_sound(found: Any, machines: int, replicas: int) -> None:
    """Every machine in one group, every checkpoint on as many machines as replicas, its own first; as many on each."""
    assert sorted(i for group in found["groups"] for i in group) == list(range(machines))
    assert all(kept[0] == i and len(set(kept)) == replicas for i, kept in enumerate(found["holders"]))
    assert set(Counter(i for kept in found["holders"] for i in kept).values()) == {replicas}
    group_of = {i: set(group) for group in found["groups"] for i in group}
    assert all(set(kept) <= group_of[kept[0]] for kept in found["holders"])
    assert all(replicas <= len(group) < 2 * replicas for group in found["groups"])
    assert found["strategy"] == ("mixed" if any(len(g) > replicas for g in found["groups"]) else "group")


names = st.sampled_from("abcdefgh")


@given(st.data())
@settings(deadline=None)
def test_any_machines_with_any_domains_are_placed_soundly(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 24))
    replicas = data.draw(st.integers(1, min(count, 5)))
    machines: list[dict[str, Any]] = []
    for _ in range(count):
        island, rack, host = data.draw(st.tuples(names, names, names))
        at = {"island": island, "rack": f"{island}/{rack}", "host": f"{island}/{rack}/{host}"}
        machines.append({"link_bps": data.draw(st.integers(1, 5)) * 1e9} | at)
    more = {"site_safe": data.draw(st.booleans()), "checkpoint_bytes": 10**9}
    found = plan(machines, replicas, **more)
    require_sound(found, count, replicas)
    assert found == plan(machines, replicas, **more)
    for kept in found["holders"]:
        for level in ("host", "rack", "island"):
            together = {machines[i][level] for i in kept}
            assert len(together) > 1 or together <= set(found["fatal_domains"][level])


@given(st.lists(st.integers(1, 7), min_size=2, max_size=8), st.integers(2, 4))
@settings(deadline=None)
def test_racks_are_never_shared_where_that_can_be_helped(sizes: list[int], replicas: int) -> None:
    """It can if no rack has more machines than there are groups, and a ring finds one in each of as many racks."""
    machines = [{"rack": f"r{rack}"} for rack, size in enumerate(sizes) for _ in range(size)]
    blocks = len(machines) // replicas
    ring = replicas + len(machines) % replicas
    if blocks == 0 or max(sizes) > blocks or len(sizes) < ring:
        return
    found = plan(machines, replicas)
    for kept in found["holders"]:
        assert len({machines[i]["rack"] for i in kept}) == replicas
    assert found["fatal_domains"] == {"host": [], "rack": [], "island": []}


def test_machines_of_one_host_are_apart_and_one_rack_alone_does_not_keep_hosts_together() -> None:
    machines = [{"rack": "only", "host": f"h{i // 4}"} for i in range(16)]
    found = plan(machines, 2)
    assert all(len({machines[i]["host"] for i in kept}) == 2 for kept in found["holders"])
    assert found["fatal_domains"] == {"host": [], "rack": ["only"], "island": []}
    unknown_rack = [{"host": machine["host"]} for machine in machines]
    assert plan(unknown_rack, 2)["fatal_domains"]["host"] == []


def test_replicas_stay_on_their_island_unless_the_loss_of_a_site_has_to_be_survived() -> None:
    machines = [{"island": "ab"[i % 2]} for i in range(8)]
    inside = plan(machines, 2)
    assert all(len({machines[i]["island"] for i in kept}) == 1 for kept in inside["holders"])
    assert inside["fatal_domains"]["island"] == ["a", "b"]
    across = plan(machines, 2, site_safe=True)
    assert all(len({machines[i]["island"] for i in kept}) == 2 for kept in across["holders"])
    assert across["fatal_domains"]["island"] == []


def test_each_island_that_does_not_divide_has_a_ring_of_its_own() -> None:
    found = plan([{"island": "ab"[i // 5]} for i in range(10)], 2)
    assert found["groups"] == [[0, 1], [5, 6], [2, 3, 4], [7, 8, 9]]
    assert found["strategy"] == "mixed"


def test_an_island_too_small_for_the_replicas_is_placed_with_the_smallest_that_is_not() -> None:
    found = plan([{"island": name} for name in "aaaaabbbc"], 2)
    require_sound(found, 9, 2)
    assert {0, 1, 2, 3, 4} == {i for group in found["groups"] if 0 in group or group[0] < 5 for i in group}


def test_slow_links_are_put_together_so_that_fast_machines_wait_for_none() -> None:
    machines = [{"link_bps": 1e9 if i % 2 else 10e9} for i in range(8)]
    found = plan(machines, 2)
    assert sorted(sorted(machines[i]["link_bps"] for i in group) for group in found["groups"]) == [
        [1e9, 1e9],
        [1e9, 1e9],
        [10e9, 10e9],
        [10e9, 10e9],
    ]


def test_one_short_machine_keeps_no_replica_of_others_and_the_rest_goes_on() -> None:
    """1. One machine has room for its own alone. 2. The planner refused the whole placement for it. 3. Now what was to
    lie there lies on the one with the most room, or nowhere, and both are told; domains are told as they are then."""
    room = [4_000_000_000, 3_999_999_999, 4_000_000_000, 6_000_000_000]
    machines = [{"host": name, "memory_bytes": free} for name, free in zip("abcd", room, strict=True)]
    found = plan(machines, 2, checkpoint_bytes=1_000_000_000)
    assert (found["groups"], found["without_room"]) == ([[0, 1], [2, 3]], [[0, 1]])
    assert found["holders"] == [[0, 3], [1, 0], [2, 3], [3, 2]]
    assert "recovery_probability" not in found
    assert found["fatal_domains"]["host"] == []
    nowhere = plan(machines[:2], 2, checkpoint_bytes=1_000_000_000)
    assert (nowhere["holders"], nowhere["without_room"]) == ([[0], [1, 0]], [[0, 1]])
    assert nowhere["fatal_domains"]["host"] == ["a"]


def test_a_machine_without_room_for_its_own_is_named_and_holds_nothing() -> None:
    sizes = [{"memory_bytes": 10, "checkpoint_bytes": 6}, *({"memory_bytes": 40, "checkpoint_bytes": 6},) * 3]
    found = plan(sizes, 2)
    assert found["own_without_room"] == [0]
    assert all(0 not in each[1:] for each in found["holders"])
    assert all(len(each) == 2 for each in found["holders"])


def test_replicas_that_fit_in_no_memory_are_refused_with_figures() -> None:
    machines = [{"memory_bytes": 3_999_999_999}, {"memory_bytes": 3_999_999_998}]
    said = r"take 2000000000 bytes or more; machines\[0\] has 3999999999 free, of which its own take 2000000000"
    with pytest.raises(NoFeasiblePlan, match=said):
        plan(machines, 2, checkpoint_bytes=1_000_000_000)
    assert plan(machines, 2, checkpoint_bytes=999_999_999)["strategy"] == "group"
    with pytest.raises(BadInput, match="checkpoint_bytes is missing"):
        plan(machines, 2)


@pytest.mark.parametrize(
    ("machines", "more", "says"),
    [
        (1, {}, "replicas = 2 needs as many machines; there are 1 machine"),
        ([{"host": "h", "rack": "a"}, {"host": "h", "rack": "b"}], {}, r"machines\[1\]: host 'h' has rack 'b'"),
        ([{"name": "a"}, {"name": "a"}], {}, "machines name 'a' twice"),
        ([{"name": "a"}, {}], {"previous": {}}, r"machines\[1\].name is missing"),
        ([{"speed": 1}, {}], {}, r"unknown field 'machines\[0\].speed'"),
        (2, {"site_safe": 1}, "site_safe = 1 is wrong: it should be a valid boolean"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(machines: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        plan(machines, 2, **more)


def named(who: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in who]


def holders_of(who: str, found: Any) -> dict[str, list[str]]:
    return {who[kept[0]]: [who[i] for i in kept] for kept in found["holders"]}


def after(before: str, now: str, replicas: int) -> Any:
    return plan(named(now), replicas, previous=holders_of(before, plan(named(before), replicas)))


def fewest_moves(before: str, now: str, replicas: int) -> int:
    """Over all orders of the machines, each cut into groups and, last, a ring."""
    had = holders_of(before, plan(named(before), replicas))
    sizes = [len(group) for group in plan(len(now), replicas)["groups"]]
    found = []
    for order in itertools.permutations(now):
        moved, first = 0, 0
        for size in sizes:
            block = order[first : first + size]
            first += size
            for at in range(size):
                kept = [block[(at + j) % size] for j in range(replicas)]
                moved += sum(name not in had.get(kept[0], []) for name in kept[1:])
        found.append(moved)
    return min(found)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("abcdef", "abcdef"),
        ("abcdef", "fedcba"),
        ("abcdef", "abcde"),
        ("abcde", "abcdef"),
        ("abcdef", "abXdef"),
        ("abcdef", "XbcdeY"),
        ("abcdef", "acdf"),
        ("abcdefg", "abcdfg"),
        ("abcdefg", "bcdef"),
        ("abcd", "abcdXYZ"),
        ("abcde", "abcdeXY"),
    ],
)
@pytest.mark.parametrize("replicas", [2, 3])
def test_after_a_change_no_placement_would_move_fewer_replicas(before: str, now: str, replicas: int) -> None:
    found = after(before, now, replicas)
    require_sound(found, len(now), replicas)
    assert found["moved"] == fewest_moves(before, now, replicas)


@given(st.integers(2, 4), st.integers(8, 40), st.data())
@settings(deadline=None)
def test_one_machine_that_is_replaced_moves_its_replicas_and_no_others(m: int, count: int, data: st.DataObject) -> None:
    before = "".join(chr(0x4E00 + i) for i in range(count))
    gone = data.draw(st.sampled_from(before))
    found = after(before, before.replace(gone, "X"), m)
    assert found["moved"] == 2 * (m - 1)


def test_a_replacement_in_the_rack_of_the_survivor_is_exchanged_with_one_elsewhere() -> None:
    """1. Two racks, groups across them. 2. A machine of rack a is replaced by one in rack b."""
    racks = dict.fromkeys("ace", "a") | dict.fromkeys("bdf", "b") | {"X": "b", "g": "c", "h": "c"}
    who = "abcdefgh"

    def at(names: str) -> list[dict[str, Any]]:
        return [{"name": name, "rack": racks[name]} for name in names]

    first = plan(at(who), 2)
    now = who.replace("a", "X")
    found = plan(at(now), 2, previous=holders_of(who, first))
    assert all(len({racks[now[i]] for i in kept}) == 2 for kept in found["holders"])
    assert found["moved"] <= 4


@given(st.data())
@settings(deadline=None)
def test_after_any_change_of_any_machines_all_are_placed_soundly_and_share_no_more_than_afresh(
    data: st.DataObject,
) -> None:
    """Previous holders may be of another number of replicas, and of other racks."""
    everyone = "abcdefghijklmnop"
    before = data.draw(st.lists(st.sampled_from(everyone), min_size=2, unique=True))
    now = data.draw(st.lists(st.sampled_from(everyone), min_size=2, unique=True))
    had = plan(named("".join(before)), data.draw(st.integers(1, min(len(before), 4))))
    previous = holders_of("".join(before), had)
    machines = [{"name": name, "rack": data.draw(st.sampled_from("rst"))} for name in now]
    replicas = data.draw(st.integers(1, min(len(now), 4)))
    found = plan(machines, replicas, previous=previous)
    require_sound(found, len(now), replicas)
    kept = [(now[each[0]], now[i]) for each in found["holders"] for i in each[1:]]
    assert found["moved"] == sum(holder not in previous.get(owner, []) for owner, holder in kept)
    fresh = plan(machines, replicas)
    assert shared_racks(machines, found) <= shared_racks(machines, fresh)


def shared_racks(machines: list[dict[str, Any]], found: Any) -> int:
    return sum(len(kept) - len({machines[i]["rack"] for i in kept}) for kept in found["holders"])


@pytest.mark.parametrize(
    ("previous", "says"),
    [
        ([["a"]], r"previous = \[\['a'\]\] is wrong: it should be an object"),
        ({"a": []}, r"previous.a = \[\] is wrong: .* at least 1 item"),
        ({"a": ["a", 3]}, r"previous.a\[1\] = 3 is wrong: it should be a valid string"),
        ({"": ["a"]}, r"previous\.'' = '' is wrong: string should have at least 1 character"),
    ],
)
def test_holders_that_are_none_are_refused_by_their_place(previous: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        plan(named("ab"), 2, previous=previous)
