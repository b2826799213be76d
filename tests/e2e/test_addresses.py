"""Clusters whose workers meet under IPv6, and whose machines change their address while they train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from behind_nat import Sites, why_not
from cluster import Cluster, hurry, trained_samples
from held_ports import free_port

from atoll.v1 import jobs_pb2 as pb

WHY_NOT = why_not()


def test_workers_meet_under_ipv6(cluster: Cluster, tmp_path: Path) -> None:
    """The rendezvous, gloo, Atoll's own wire and copies of checkpoints, all at [::1]."""
    cluster.controller()
    for name in ("agent-0", "agent-1"):
        cluster.agent(name, 1.0, "--address", "::1", "--island", name)
    cluster.wait_for_nodes(2)
    assert {node.address for node in cluster.client.nodes().nodes} == {"::1"}
    out = tmp_path / "out"
    out.mkdir()
    hurry(out)
    job = cluster.submit("tiny.py", "--out", str(out), "--epochs", "1", workers=(2, 2), strategy="local-steps")
    seen = cluster.wait_for_end(job)
    assert (seen.phase, seen.run) == (pb.PHASE_DONE, 1), cluster.story(job)
    (steps,) = trained_samples(out).values()
    assert sorted(sample for ids in steps.values() for sample in ids) == list(range(600))


@pytest.mark.skipif(WHY_NOT != "", reason=f"NO TEST OF A CHANGED ADDRESS HERE: {WHY_NOT}")
def test_a_machine_that_comes_back_under_another_address_trains_on(cluster: Cluster, tmp_path: Path) -> None:
    """1. Two machines train. 2. One of them gets another address; what was open to the old one is silent from then on.
    3. Its agent registers again, its worker listens at the new address, and the run goes on without a restart."""
    with Sites(1) as sites:
        port = free_port()
        cluster.addresses.append(f"127.0.0.1:{port}")
        data = ("--data-dir", str(cluster.folder / "controller"))
        cluster.atoll("controller", "controller", "--listen", f"0.0.0.0:{port}", "--insecure", *data)
        for name, inside in (("near", ()), ("far", sites.inside(0))):
            cluster.start(
                name,
                (
                    *inside, sys.executable, "-m", "atoll.cli.main", "agent", "--controller", f"{sites.here(0)}:{port}",
                    "--name", name, "--island", name, "--threads", "1", "--state-dir", str(cluster.folder / name),
                    "--jobs-dir", str(cluster.folder / "jobs"),
                ),
            )  # fmt: skip
        cluster.wait_for_nodes(2)
        out = tmp_path / "out"
        options = ("--out", str(out), "--epochs", "2", "--step-s", "0.1")
        job = cluster.submit("tiny.py", *options, workers=(2, 2), strategy="local-steps")
        cluster.wait_for_step(job, 10)
        sites.move(0)
        cluster.wait_for(job, "going on in place", lambda seen: "continued in place" in cluster.story(job), 90)
        nodes = {node.name: node.address for node in cluster.client.nodes().nodes}
        assert nodes["far"] == sites.address(0)
        hurry(out)
        seen = cluster.wait_for_end(job)
        print(cluster.story(job))
        assert (seen.phase, seen.run) == (pb.PHASE_DONE, 1), cluster.story(job)
        for steps in trained_samples(out).values():
            assert sorted(sample for ids in steps.values() for sample in ids) == list(range(600))
