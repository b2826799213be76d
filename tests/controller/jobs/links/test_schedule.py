"""Which pairs of nodes are measured, and when."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest

from atoll.controller.jobs.links.schedule import (
    CONFIRM_S,
    FAILED_S,
    IDLE_BURST_S,
    IDLE_SHARE,
    REMEASURE_S,
    TRAINING_BURST_S,
    TRAINING_SHARE,
    WATCH_S,
    MeasurableNode,
    MeasurementQueue,
    PairHistory,
    pair_of,
    past_due,
    rest_s,
    wanted_pairs,
)
from atoll.controller.planners.islands.clusters import IslandNode, IslandsInput, NodePair, plan_islands


def node(name: str, **fields: Any) -> MeasurableNode:
    given = {"island": f"own-{name}", "host": name, "dialled": True, "trains": False, "local": False, "free_s": 0.0}
    return MeasurableNode(name=name, **{**given, **fields})


def test_few_nodes_measure_all_pairs() -> None:
    assert wanted_pairs([node(name) for name in "abcd"]) == tuple(combinations("abcd", 2))


def test_nothing_is_measured_inside_one_network_stack_or_where_no_end_can_be_dialled() -> None:
    local = {"host": "box", "local": True}
    assert wanted_pairs([node("a", **local), node("b", **local), node("c")]) == (("a", "c"), ("b", "c"))
    assert wanted_pairs([node("a", dialled=False), node("b", dialled=False), node("c")]) == (("a", "c"), ("b", "c"))


def test_a_thousand_nodes_measure_some_twenty_thousand_pairs() -> None:
    nodes = [node(f"n{number:04d}", island=f"site-{number % 7}") for number in range(1000)]
    pairs = wanted_pairs(nodes)
    assert len(pairs) < 20_000
    busiest = max(sum(node.name in pair for pair in pairs) for node in nodes[:50])
    assert busiest < 60  # who is measured by each node of an island is not the same for all


@pytest.mark.parametrize("sites", [1, 5, 9])
def test_the_measured_pairs_of_fifty_nodes_are_enough_to_find_their_sites(sites: int) -> None:
    """1. All nodes are alone at first, and the pairs are chosen. 2. They are grouped by these. 3. Again, with the pairs
    that follow from the islands: after a few rounds every node is at its site."""
    site_of = {f"n{number:02d}": f"site-{number % sites}" for number in range(50)}
    island_of = {name: f"own-{name}" for name in site_of}
    measured: set[tuple[str, str]] = set()
    for _ in range(4):
        measured |= set(wanted_pairs([node(name, island=island) for name, island in island_of.items()]))
        pairs = []
        for a, b in sorted(measured):
            near = site_of[a] == site_of[b]
            bps, rtt_s = (0.9e9, 2e-4) if near else (5e7, 0.02)
            pairs.append(NodePair(from_node=a, to_node=b, bandwidth_bps=bps, rtt_s=rtt_s))
        nodes = tuple(IslandNode(name=name) for name in site_of)
        found = plan_islands(IslandsInput(nodes=nodes, pairs=tuple(pairs)))
        island_of = {name: island.name for island in found.islands for name in island.nodes}
    assert len(found.islands) == sites
    assert all(len({site_of[name] for name in island.nodes}) == 1 for island in found.islands)


def test_a_node_takes_part_in_one_measurement_at_a_time() -> None:
    nodes = {name: node(name) for name in "abcd"}
    queue = MeasurementQueue(wanted_pairs(list(nodes.values())))
    asked = queue.due(nodes, 0.0)
    assert [(one.by, one.to, one.burst_s) for one in asked] == [("a", "b", IDLE_BURST_S), ("c", "d", IDLE_BURST_S)]
    busy = {**nodes, "a": node("a", free_s=9.0), "b": node("b", free_s=9.0)}
    assert [(one.by, one.to) for one in queue.due(busy, 1.0)] == [("c", "d")]


def test_pairs_never_measured_come_first_then_the_links_between_islands_seen_longest_ago() -> None:
    nodes = {name: node(name, island=name[0], trains=True) for name in ("a1", "a2", "b1", "c1")}
    queue = MeasurementQueue(wanted_pairs(list(nodes.values())))
    queue.history = {pair: PairHistory(measured_s=100.0) for pair in queue.pairs}
    queue.history["a1", "a2"] = PairHistory(measured_s=50.0)
    queue.history["a1", "b1"] = PairHistory(measured_s=40.0)  # a2 and b1 measured the same islands later
    queue.history["a1", "c1"] = queue.history["a2", "c1"] = PairHistory(measured_s=45.0)
    first = queue.due(nodes, 200.0)[0]
    assert (first.by, first.to, first.burst_s) == ("a1", "c1", TRAINING_BURST_S)
    del queue.history["b1", "c1"]
    first = queue.due(nodes, 200.0)[0]
    assert (first.by, first.to) == ("b1", "c1")


def test_a_link_is_measured_again_rarely_and_soon_where_workers_train_or_a_reading_is_doubtful() -> None:
    past = PairHistory(measured_s=0.0)
    assert not past_due(past, REMEASURE_S - 1, trains=False)
    assert past_due(past, REMEASURE_S, trains=False)
    assert past_due(past, WATCH_S, trains=True)
    assert past_due(PairHistory(measured_s=0.0, doubtful=True), CONFIRM_S, trains=False)
    failing = PairHistory(failures=3, tried_s=0.0)
    assert not past_due(failing, 4 * FAILED_S - 1, trains=True)
    assert past_due(failing, 4 * FAILED_S, trains=True)
    assert past_due(PairHistory(failures=1000, tried_s=0.0), REMEASURE_S, trains=False)


def test_measurements_of_a_training_node_take_their_share_of_time_at_most() -> None:
    assert 0.2 / (0.2 + rest_s(0.2, trains=True)) == pytest.approx(TRAINING_SHARE)
    assert 0.2 / (0.2 + rest_s(0.2, trains=False)) == pytest.approx(IDLE_SHARE)


def test_the_end_that_can_be_dialled_is_dialled_and_after_a_failure_the_other() -> None:
    queue = MeasurementQueue((("a", "b"),))
    nodes = {"a": node("a"), "b": node("b")}
    assert queue.due(nodes, 0.0)[0][:2] == ("a", "b")
    queue.history["a", "b"] = PairHistory(failures=1, tried_s=-math.inf)
    assert queue.due(nodes, 0.0)[0][:2] == ("b", "a")
    assert queue.due({**nodes, "a": node("a", dialled=False)}, 0.0)[0][:2] == ("a", "b")
    assert queue.due({**nodes, "b": node("b", local=True)}, 0.0)[0][:2] == ("b", "a")
    assert pair_of("b", "a") == ("a", "b")


def test_a_node_is_new_until_each_of_its_pairs_was_measured_or_failed_twice() -> None:
    """One end of a pair may have been engaged when the other one asked: a single failure says nothing."""
    queue = MeasurementQueue((("a", "b"), ("a", "c")))
    queue.history["a", "b"] = PairHistory(measured_s=1.0)
    queue.history["a", "c"] = PairHistory(failures=1, tried_s=2.0)
    assert [queue.is_new(name) for name in "abcd"] == [True, False, True, False]
    queue.history["a", "c"] = PairHistory(failures=2, tried_s=3.0)
    assert not queue.is_new("a")
