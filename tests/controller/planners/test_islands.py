"""Which nodes are one island: networks as people have them, and noise and gaps that may not change the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

from atoll.controller.planners.islands.clusters import IslandNode, IslandsInput, IslandsPlan, NodePair, plan_islands

GBIT, MBIT = 1e9, 1e6
LAN = (0.94 * GBIT, 0.0002)
"""Bits a second and round-trip time."""
Link = tuple[float, float]


def grouped(planned: IslandsPlan) -> list[str]:
    return sorted(" ".join(island.nodes) for island in planned.islands)


def pairs(
    link_of: Callable[[str, str], Link | None], names: Sequence[str], noise: float = 0, seed: int = 0
) -> list[NodePair]:
    """Both directions of each pair, for which link_of may differ."""
    rng = random.Random(seed)

    def noisy(value: float) -> float:
        return value * rng.uniform(1 - noise, 1 + noise)

    made = []
    for one, other in combinations(names, 2):
        for a, b in ((one, other), (other, one)):
            if (link := link_of(a, b)) is not None:
                made.append(NodePair(from_node=a, to_node=b, bandwidth_bps=noisy(link[0]), rtt_s=noisy(link[1])))
    return made


def sites(
    inside: Mapping[str, Link], between: Link, own: Mapping[str, Link] | None = None
) -> Callable[[str, str], Link]:
    """A node's site is the first letter of its name. own: nodes with a link that is thinner than their site's."""

    def link_of(a: str, b: str) -> Link:
        links = [inside[a[0]] if a[0] == b[0] else between, *((own or {})[n] for n in (a, b) if n in (own or {}))]
        return min(bps for bps, _ in links), max(rtt_s for _, rtt_s in links)

    return link_of


def planned(
    names: str,
    link_of: Callable[[str, str], Link | None],
    *,
    host: Mapping[str, str] | None = None,
    nat: Iterable[str] = (),
    island: Mapping[str, str] | None = None,
    previous: Mapping[str, str] | None = None,
    noise: float = 0,
    seed: int = 0,
) -> IslandsPlan:
    named, behind = names.split(), set(nat)
    nodes = tuple(
        IslandNode(name=n, host=(host or {}).get(n, f"host-{n}"), nat=n in behind, island=(island or {}).get(n, ""))
        for n in named
    )
    measured = tuple(pairs(link_of, named, noise, seed))
    return plan_islands(IslandsInput(nodes=nodes, pairs=measured, previous=previous or {}))


TWO_LANS = sites({"a": LAN, "b": LAN}, (50 * MBIT, 0.02))


def test_a_flat_lan_is_one_island() -> None:
    found = planned("a1 a2 a3 a4 a5", sites({"a": LAN}, LAN))
    assert grouped(found) == ["a1 a2 a3 a4 a5"]
    (island,) = found.islands
    assert (island.name, island.settled) == ("lan-1", True)
    assert island.reason == "940 Mbit/s and 0.2 ms between its nodes"


def test_two_lans_over_a_wan_are_two() -> None:
    found = planned("a1 a2 b1 b2", TWO_LANS)
    assert grouped(found) == ["a1 a2", "b1 b2"]
    assert found.islands[0].reason == (
        "940 Mbit/s and 0.2 ms between its nodes; lan-2 is the nearest other with 50 Mbit/s and 20 ms: an island needs "
        "200 Mbit/s"
    )


def test_three_sites_of_unequal_size_and_speed() -> None:
    inside = {"a": (9.4 * GBIT, 0.0001), "b": LAN, "c": LAN}
    found = planned("a1 a2 a3 a4 a5 a6 b1 b2 c1", sites(inside, (200 * MBIT, 0.012)))
    assert grouped(found) == ["a1 a2 a3 a4 a5 a6", "b1 b2", "c1"]


def test_a_slow_wifi_member_is_split_off() -> None:
    found = planned("a1 a2 a3 w", sites({"a": LAN, "w": LAN}, LAN, {"w": (60 * MBIT, 0.004)}))
    assert grouped(found) == ["a1 a2 a3", "w"]


def test_one_slow_member_of_a_fast_lan_is_split_off() -> None:
    found = planned("a1 a2 a3 s", sites({"a": (20 * GBIT, 5e-5), "s": LAN}, LAN, {"s": LAN}))
    assert grouped(found) == ["a1 a2 a3", "s"]


def test_a_laptop_behind_nat_is_its_own_however_fast_the_relay_is() -> None:
    found = planned("a1 a2 laptop", sites({"a": LAN, "l": LAN}, LAN), nat=["laptop"])
    assert grouped(found) == ["a1 a2", "laptop"]
    assert found.islands[1].reason.startswith("behind NAT")


def test_two_agents_on_one_laptop_behind_nat_are_one() -> None:
    host = {"l1": "laptop", "l2": "laptop"}
    assert grouped(planned("a1 l1 l2", lambda a, b: None, nat=["l1", "l2"], host=host)) == ["a1", "l1 l2"]


def test_an_asymmetric_line_counts_by_its_worse_direction() -> None:
    def dsl(a: str, b: str) -> Link:
        if "home" not in (a, b):
            return LAN
        return (40 * MBIT, 0.004) if a == "home" else (900 * MBIT, 0.004)

    assert grouped(planned("a1 a2 home", dsl)) == ["a1 a2", "home"]


def test_a_star_of_homes_has_no_island_of_two() -> None:
    def star(a: str, b: str) -> Link:
        return (100 * MBIT, 0.015) if "hub" in (a, b) else (30 * MBIT, 0.03)

    assert grouped(planned("hub l1 l2 l3 l4", star)) == ["hub", "l1", "l2", "l3", "l4"]


def test_containers_on_one_host_are_one_though_nothing_was_measured() -> None:
    found = planned("c1 c2 c3", lambda a, b: None, host=dict.fromkeys(("c1", "c2", "c3"), "box"))
    assert grouped(found) == ["c1 c2 c3"]
    assert (found.islands[0].reason, found.islands[0].settled) == ("all on one host", True)


def test_hosts_with_two_agents_each_are_one_lan() -> None:
    """The memory of a host is far faster than the network. It does not make the network thin."""
    host = {f"a{i}": f"box-{i // 2}" for i in range(6)}
    found = planned("a0 a1 a2 a3 a4 a5", lambda a, b: (30 * GBIT, 3e-5) if host[a] == host[b] else LAN, host=host)
    assert grouped(found) == ["a0 a1 a2 a3 a4 a5"]


def test_a_limit_between_containers_of_one_host_counts() -> None:
    """Network namespaces with a shaped link between them stand for machines."""
    host = dict.fromkeys(("a1", "a2", "b1", "b2"), "box")
    found = planned("a1 a2 b1 b2", sites({"a": (8 * GBIT, 5e-5), "b": (8 * GBIT, 5e-5)}, (20 * MBIT, 1e-4)), host=host)
    assert grouped(found) == ["a1 a2", "b1 b2"]


def test_names_of_operators_win_and_their_lan_joins_them() -> None:
    island = {"a1": "lab", "a2": "lab", "b1": "lab", "c1": "north", "c2": "south"}
    inside = {"a": LAN, "b": LAN, "c": LAN}
    found = planned("a1 a2 a3 b1 c1 c2 d1", sites(inside | {"d": LAN}, (50 * MBIT, 0.02)), island=island)
    assert {i.name: i.nodes for i in found.islands} == {
        "lab": ("a1", "a2", "a3", "b1"), "north": ("c1",), "south": ("c2",), "lan-1": ("d1",),
    }  # fmt: skip
    assert found.islands[0].reason.startswith("named by the operator")


@pytest.mark.parametrize("between", [(100 * MBIT, 0.01), (0.94 * GBIT, 0.0003)])
def test_a_10g_lan_and_a_1g_lan_are_two(between: Link) -> None:
    inside = {"a": (9.4 * GBIT, 0.0001), "b": LAN}
    assert grouped(planned("a1 a2 a3 b1 b2 b3", sites(inside, between))) == ["a1 a2 a3", "b1 b2 b3"]


def test_the_same_round_trip_over_a_thin_link() -> None:
    found = planned("a1 a2 b1 b2", sites({"a": LAN, "b": LAN}, (20 * MBIT, 0.0002)))
    assert grouped(found) == ["a1 a2", "b1 b2"]


def test_a_fat_link_that_is_far() -> None:
    found = planned("a1 a2 b1 b2", sites({"a": (9.4 * GBIT, 1e-4), "b": (9.4 * GBIT, 1e-4)}, (9 * GBIT, 0.1)))
    assert grouped(found) == ["a1 a2", "b1 b2"]


def test_two_halls_of_one_campus_with_a_fat_link_are_two() -> None:
    found = planned("a1 a2 b1 b2", sites({"a": LAN, "b": LAN}, (0.9 * GBIT, 0.003)))
    assert grouped(found) == ["a1 a2", "b1 b2"]


def test_missing_measurements_are_bridged_inside_a_lan() -> None:
    """Each node measured its neighbour in a ring, and one node of the other LAN."""

    def some(a: str, b: str) -> Link | None:
        near = abs(int(a[1]) - int(b[1])) == 1
        return TWO_LANS(a, b) if (a[0] == b[0] and near) or {a, b} == {"a1", "b1"} else None

    assert grouped(planned("a1 a2 a3 a4 b1 b2 b3", some)) == ["a1 a2 a3 a4", "b1 b2 b3"]


def test_a_node_without_a_measurement_is_alone_and_not_settled() -> None:
    found = planned("a1 a2 new", lambda a, b: None if "new" in (a, b) else LAN)
    assert grouped(found) == ["a1 a2", "new"]
    alone = found.islands[1]
    assert (alone.settled, alone.reason) == (False, "no link of it is measured yet")


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_third_changes_nothing(seed: int) -> None:
    inside = {"a": LAN, "b": (9.4 * GBIT, 1e-4), "w": LAN}
    link_of = sites(inside, (100 * MBIT, 0.008), {"w": (60 * MBIT, 0.003)})
    found = planned("a1 a2 a3 a4 b1 b2 b3 w", link_of, noise=0.3, seed=seed)
    assert grouped(found) == ["a1 a2 a3 a4", "b1 b2 b3", "w"]


def test_a_single_node() -> None:
    assert grouped(planned("a", lambda a, b: None)) == ["a"]


@pytest.mark.parametrize("seed", range(5))
def test_fifty_nodes_in_five_sites_with_half_of_the_pairs_measured(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"{site}{n:02d}" for site in "abcde" for n in range(10)]
    whole = sites(dict.fromkeys("abcde", LAN), (100 * MBIT, 0.015))
    found = planned(" ".join(names), lambda a, b: whole(a, b) if rng.random() < 0.4 else None, noise=0.3, seed=seed)
    assert [len(island.nodes) for island in found.islands] == [10] * 5


def test_a_node_moves_only_on_a_clear_change() -> None:
    """1. A link near the bound keeps who was together together, and who was apart apart. 2. A clear change moves."""
    near, thin, fat = (180 * MBIT, 0.001), (60 * MBIT, 0.001), (500 * MBIT, 0.001)
    together, apart = {"a1": "lan-1", "b1": "lan-1"}, {"a1": "lan-1", "b1": "lan-2"}

    def found(link: Link, previous: Mapping[str, str]) -> list[str]:
        return grouped(planned("a1 b1", lambda a, b: link, previous=previous))

    assert found(near, together) == ["a1 b1"]
    assert found((250 * MBIT, 0.001), apart) == ["a1", "b1"]
    assert found(thin, together) == ["a1", "b1"]
    assert found(fat, apart) == ["a1 b1"]


def test_islands_keep_their_names() -> None:
    previous = {"a1": "lan-2", "a2": "lan-2", "b1": "lan-1"}
    found = planned("a1 a2 b1 b2 c1", sites(dict.fromkeys("abc", LAN), (50 * MBIT, 0.02)), previous=previous)
    assert {i.name: i.nodes for i in found.islands} == {"lan-1": ("b1", "b2"), "lan-2": ("a1", "a2"), "lan-3": ("c1",)}


def test_a_thousand_nodes_are_grouped_in_time() -> None:
    rng = random.Random(1)
    names = [f"{'abcdefgh'[n % 8]}{n:03d}" for n in range(1000)]
    whole = sites(dict.fromkeys("abcdefgh", LAN), (100 * MBIT, 0.015))
    chosen = {frozenset(rng.sample(names, 2)) for _ in range(20_000)}
    chosen |= {frozenset((a, b)) for a, b in zip(names, names[8:], strict=False)}
    made = []
    for a, b in sorted(tuple(sorted(pair)) for pair in chosen):
        bps, rtt_s = whole(a, b)
        made.append(NodePair(from_node=a, to_node=b, bandwidth_bps=bps * rng.uniform(0.7, 1.3), rtt_s=rtt_s))
    nodes = tuple(IslandNode(name=name, host=name) for name in names)
    found = plan_islands(IslandsInput(nodes=nodes, pairs=tuple(made)))
    assert [len(island.nodes) for island in found.islands] == [125] * 8


SLOW_LAN = (94 * MBIT, 0.0004)


@pytest.mark.parametrize("between", [(10 * MBIT, 0.02), (50 * MBIT, 0.008)])
def test_two_slow_lans_over_a_wan_are_two(between: Link) -> None:
    found = planned("a1 a2 a3 b1 b2", sites({"a": SLOW_LAN, "b": SLOW_LAN}, between))
    assert grouped(found) == ["a1 a2 a3", "b1 b2"]
    assert found.islands[0].reason.startswith("94 Mbit/s and 0.4 ms between its nodes; lan-2 is the nearest other")


def test_thin_links_alone_are_no_slow_lan() -> None:
    """A laboratory's sites have no round trip, and neither have three machines at one 100 Mbit/s switch."""
    assert grouped(planned("a1 b1 c1", lambda a, b: SLOW_LAN)) == ["a1", "b1", "c1"]
    thinner = sites({}, SLOW_LAN, {"c": (10 * MBIT, 0.0004)})
    assert grouped(planned("a1 b1 c1", thinner)) == ["a1", "b1", "c1"]
