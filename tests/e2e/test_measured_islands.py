"""Machines whose islands are measured by their agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cluster import SCRIPTS, Cluster, wait_until
from held_ports import free_port
from two_lans import TwoLans, why_no_lans

from atoll.cli.render.views import island_lines
from atoll.v1 import common_pb2 as common

WHY_NOT = why_no_lans()
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=f"NO TEST OF MEASURED ISLANDS HERE: {WHY_NOT}")


@pytest.fixture
def lans() -> Iterator[TwoLans]:
    with TwoLans("a1", "a2", "b1", "b2", "a-laptop") as made:
        made.shape(20)
        yield made


@pytest.fixture
def joined(cluster: Cluster, lans: TwoLans) -> Cluster:
    """A controller on LAN a, and an agent on each machine; the laptop says that it is behind NAT. None has --island."""
    port = free_port()
    cluster.addresses.append(f"127.0.0.1:{port}")
    data = ("--data-dir", str(cluster.folder / "controller"))
    cluster.atoll("controller", "controller", "--listen", f"0.0.0.0:{port}", "--insecure", *data)
    for machine in lans.machines:
        cluster.start(
            machine,
            (
                *lans.inside(machine), sys.executable, "-m", "atoll.cli.main", "agent", "--controller",
                f"{lans.here}:{port}", "--name", machine, "--threads", "1", "--state-dir",
                str(cluster.folder / machine), "--jobs-dir", str(cluster.folder / "jobs"),
                *(("--behind-nat",) if machine == "a-laptop" else ()),
            ),
        )  # fmt: skip
    cluster.wait_for_nodes(len(lans.machines))
    return cluster


def islands(cluster: Cluster) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for node in cluster.client.nodes().nodes:
        found.setdefault(node.island, []).append(node.name)
    return sorted(sorted(names) for names in found.values())


def check_advice(cluster: Cluster) -> None:
    """`atoll advise` takes the islands and the links between them as the agents measured them: about 20 Mbit/s."""
    script = SCRIPTS.parents[1] / "atoll/cli/scripts/advised.py"
    command = (sys.executable, "-m", "atoll.cli.main", "--controller", cluster.addresses[0], "advise", str(script))
    environment = {**os.environ, "MODEL": "mlp", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        (*command, "--json"), env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    advice = json.loads(done.stdout)
    assert sorted(advice["islands"].values()) == [1, 2, 2]
    lans = {name for name, workers in advice["islands"].items() if workers == 2}
    between = [one["bandwidth_bps"] for one in advice["links"] if {one["source"], one["target"]} == lans]
    assert len(between) == 2
    assert all(2e6 < one < 100e6 for one in between), advice["links"]  # bursts beside others, and beside training
    assert any(text.startswith("links by agents: ") for text in advice["measured"])
    assert any(text.startswith("speeds of 5 devices") for text in advice["measured"]), advice["assumed"]
    assert [one["name"] for one in advice["strategies"] if one["step_s"]], advice


def test_two_lans_and_a_laptop_behind_nat_are_three_islands(joined: Cluster, lans: TwoLans) -> None:
    """1. A job is submitted as soon as five agents have joined. 2. They measure each other, the laptop through the
    relay. 3. Two LANs and the laptop come out, with reasons and events. 4. The job's workers are in these islands."""
    job = joined.submit("tiny.py", "--out", str(joined.folder / "out"), workers=(4, 4), strategy="dense")
    apart = [["a-laptop"], ["a1", "a2"], ["b1", "b2"]]
    wait_until("three islands", lambda: islands(joined) == apart, 60)

    def measured_through_the_relay() -> str:
        lines = island_lines(joined.client.nodes().nodes)
        return next((line for line in lines if line.startswith("island a-laptop: behind NAT; lan-")), "")

    assert "is the nearest other" in wait_until("the laptop's link", measured_through_the_relay, 30)
    check_advice(joined)
    assert common.EVENT_KIND_ISLAND_CHANGED in [event.kind for event in joined.client.events("")]

    def of_workers() -> list[list[str]]:
        found: dict[str, list[str]] = {}
        for worker in joined.client.get(job).workers:
            found.setdefault(worker.island, []).append(worker.node)
        return sorted(sorted(nodes) for nodes in found.values())

    wait_until("workers in both LANs' islands", lambda: of_workers() == apart[1:], 30)
    joined.client.cancel(job)
    joined.wait_for_end(job)
