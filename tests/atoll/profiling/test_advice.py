"""Advice for made scripts and clusters: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.controller.planners.strategy_choice.facts import IslandLink
from atoll.profiling import advised_clusters
from atoll.profiling.advice import AdvisedCluster, MeasuredScript, TimedBatch, WorkerSeat, advise, planner_input, split
from atoll.v1.common_pb2 import Device
from atoll.v1.jobs_pb2 import Node, NodeLink

ENGINES = {"groups": "needs run.prepare_pipeline", "volunteer": "needs run.prepare_pipeline"}
SCRIPT = MeasuredScript(
    batch=128,
    entries=25_000_000,
    tensors=60,
    gradient_density=1.0,
    device="cpu",
    refused=ENGINES,
    timed=(TimedBatch(16, 0.12, 0.02, 500 << 20), TimedBatch(32, 0.2, 0.01, 600 << 20)),
)


def test_a_step_is_a_line_of_its_samples() -> None:
    """0.04 s and 5 ms a sample; memory grows by 6.25 MiB a sample. Noise gives no negative part."""
    assert SCRIPT.line == pytest.approx((0.04, 0.005))
    assert SCRIPT.peak_bytes(64) == 800 << 20
    assert SCRIPT.peak_bytes(1) == 500 << 20
    noisy = replace(SCRIPT, timed=(TimedBatch(16, 0.3, 0, 2), TimedBatch(32, 0.2, 0, 1)))
    assert noisy.line == (0.2, 0.0)
    assert noisy.peak_bytes(32) == 2
    superlinear = replace(SCRIPT, timed=(TimedBatch(16, 0.05, 0, 1), TimedBatch(32, 0.2, 0, 1)))
    assert superlinear.line == pytest.approx((0.0, 0.2 / 32))


def test_the_batch_is_split_so_that_all_compute_equally_long() -> None:
    """A device twice as fast gets more than twice as much, for it has the fixed part but once."""
    cluster = AdvisedCluster(places=(WorkerSeat("a", 2.0), WorkerSeat("a"), WorkerSeat("b")))
    samples = split(SCRIPT, cluster.places)
    assert sum(samples) == 128
    times_s = [(0.04 + 0.005 * one) / place.rate for one, place in zip(samples, cluster.places, strict=True)]
    assert max(times_s) == pytest.approx(min(times_s), rel=0.03)
    given = planner_input(SCRIPT, cluster)
    assert [len(island.ranks) for island in given.islands] == [2, 1]
    assert given.islands[0].ranks[0].compute_s == pytest.approx(times_s[0])
    assert split(replace(SCRIPT, batch=2), cluster.places) == (1, 1, 1)


def test_thin_links_choose_another_strategy_and_a_faster_link_is_named() -> None:
    cluster = advised_clusters.by_hand(4, (100e6, 0.001), 2)
    advice = advise(SCRIPT, cluster)
    assert advice.chosen == "local-steps" == advice.strategies[0].name
    assert {one.name for one in advice.strategies if one.refused} == {*ENGINES, "zen"}
    (faster,) = [text for text in advice.helps if "between islands on" in text]
    factor = float(faster.split()[1]) * (1e9 if "Gbit/s" in faster else 1e6) / 100e6
    assert advise(SCRIPT, cluster.with_faster_links(1.01 * factor)).chosen == "dense"
    assert advise(SCRIPT, cluster.with_faster_links(0.79 * factor)).chosen != "dense"


def test_memory_counts_what_strategies_keep() -> None:
    """Of 32 samples 600 MiB were measured; residuals and shared parameters take four bytes an entry."""
    found = {
        one.name: one.memory_bytes for one in advise(SCRIPT, advised_clusters.by_hand(4, (100e6, 0.01), 2)).strategies
    }
    assert found["dense"] == 600 << 20
    assert found["compressed"] == found["local-steps"] == (600 << 20) + 4 * SCRIPT.entries


def test_an_island_that_slows_the_others_is_named() -> None:
    """A phone far away: its links are thin, and it computes next to nothing."""
    names = ("home", "lab", "phone")
    links = tuple(
        IslandLink(
            source=a,
            target=b,
            bandwidth_bps=1e4 if "phone" in (a, b) else 10e9,
            rtt_s=0.5 if "phone" in (a, b) else 1e-4,
        )
        for a in names
        for b in names
        if a != b
    )
    places = (*[WorkerSeat("home")] * 3, *[WorkerSeat("lab")] * 3, WorkerSeat("phone", 0.05))
    advice = advise(SCRIPT, AdvisedCluster(places=places, links=links))
    (text,) = [text for text in advice.helps if text.startswith("without island")]
    assert text.startswith("without island phone: ")


def test_without_a_comparable_strategy_reasons_are_all_there_is() -> None:
    everything = dict.fromkeys(("dense", "zen", "compressed", "stale-sparse", "local-steps"), "no")
    advice = advise(replace(SCRIPT, refused=everything, timed=()), advised_clusters.by_hand(4, None, 1))
    assert (advice.chosen, advice.samples, advice.helps) == ("", (), ())
    assert all(one.refused and one.predicted is None for one in advice.strategies)


def test_a_cluster_has_the_fastest_devices_of_the_measured_kind() -> None:
    """Offline nodes and volunteers do not count, and workers beyond the devices are like those."""

    def node(name: str, island: str, *rates: float, kind: str = "cpu", connected: bool = True) -> Node:
        devices = [Device(index=index, kind=kind, work_per_s=rate) for index, rate in enumerate(rates)]
        return Node(name=name, island=island, devices=devices, connected=connected)

    nodes = [
        node("a", "home", 2e9, 1e9),
        node("b", "lab", 4e9),
        node("c", "lab", 9e9, connected=False),
        node("d", "lab", 8e9, kind="cuda"),
    ]
    found = advised_clusters.of_nodes(nodes, 2, "cpu", 2e9, (1e8, 0.01))
    assert [(seat.name, seat.island, seat.rate) for seat in found.places] == [("b/0", "lab", 2), ("a/0", "home", 1)]
    assert {(link.source, link.target) for link in found.links} == {("lab", "home"), ("home", "lab")}
    assert [place.rate for place in advised_clusters.of_nodes(nodes, 4, "cpu", 2e9, None).places] == [2, 1, 0.5, 2]
    unknown = advised_clusters.of_nodes(nodes, 2, "cpu", 0.0, None)
    assert [place.rate for place in unknown.places] == [1.0, 1.0]
    assert unknown.assumed[0].startswith("every worker has a device of its own")


def test_links_are_those_that_agents_measured() -> None:
    """The higher median of the pairs, directed; what was not measured inside an island is assumed."""

    def node(name: str, island: str, **links: float) -> Node:
        measured = [NodeLink(node=to, bandwidth_bps=bps, rtt_s=0.01) for to, bps in links.items()]
        devices = [Device(index=0, kind="cpu", work_per_s=1e9)]
        return Node(name=name, island=island, devices=devices, connected=True, links=measured)

    nodes = [
        node("a", "home", b=1e9, c=50e6),
        node("b", "home", c=70e6),
        node("c", "lab", a=20e6, d=5e9),
        node("d", "lab"),
    ]
    found = advised_clusters.of_nodes(nodes, 4, "cpu", 1e9, None)
    assert {(link.source, link.target): link.bandwidth_bps for link in found.links} == {
        ("home", "lab"): 70e6,
        ("lab", "home"): 20e6,
    }
    assert found.inside == {"home": (1e9, 0.01), "lab": (5e9, 0.01)}
    assert "links by agents: home to lab 70 Mbit/s and 10 ms" in found.measured[1]
    assert found.assumed == ()
    alone = [Node(name=one.name, island=one.island, devices=one.devices, connected=True) for one in nodes]
    unmeasured = advised_clusters.of_nodes(alone, 4, "cpu", 1e9, None)
    assert (unmeasured.links, unmeasured.inside) == ((), {})
    advice = advise(SCRIPT, unmeasured)
    assert all(one.refused for one in advice.strategies)
    assert "no link between the islands was measured" in advice.reason
    assert advice.helps[0].startswith("a measured link")


def test_a_device_without_room_for_its_part_is_named() -> None:
    """Half of a batch of 128 takes 800 MiB."""
    seats = (
        WorkerSeat("a", name="big/0", memory_bytes=4 << 30),
        WorkerSeat("b", name="small/0", memory_bytes=700 << 20),
    )
    (text,) = advise(SCRIPT, AdvisedCluster(places=seats)).careful
    assert text == "small/0 has 0.734 GB of memory, and a worker with 64 samples takes at least 0.839 GB"
    (busy,) = advise(replace(SCRIPT, busy="load"), AdvisedCluster(places=seats[:1])).careful
    assert busy == "load"
