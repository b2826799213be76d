"""top: what is on the screen, how much of it, and that a controller which is away ends nothing."""

from __future__ import annotations

import pytest
from rich.console import Console, Group
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.cli.render.overview import Overview
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


def cluster(jobs: int, nodes: int) -> Overview:
    phases = (pb.PHASE_RUNNING, pb.PHASE_FAILED)
    listed = [
        pb.Job(
            id=f"job-{n}", phase=phases[n % 2], reason="because " * 40, submitted_unix_s=100.0, ended_unix_s=n % 2 * n
        )
        for n in range(jobs)
    ]
    devices = [common.Device(kind="cuda", model="NVIDIA GeForce RTX 3090")] * 8
    machines = [pb.Node(name=f"node-{n}", island="lab", connected=n > 0, devices=devices) for n in range(nodes)]
    return Overview(listed, pb.ListNodesReply(nodes=machines, controller="head:7700"), 160.0)


@pytest.mark.parametrize(("jobs", "nodes", "height"), [(0, 0, 24), (3, 2, 24), (40, 2, 24), (4, 60, 24), (90, 90, 12)])
def test_it_fits_the_terminal_and_says_what_does_not(jobs: int, nodes: int, height: int) -> None:
    """1. No more lines than there are, none wrapped. 2. Living jobs first. 3. What is left out is counted."""
    shown = cluster(jobs, nodes)
    console = Console(width=100, height=height, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(Group(*shown.rich(height)))
    lines = captured.get().rstrip("\n").splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= 100
    assert f"{max(0, nodes - 1)} of {nodes} nodes connected" in lines[0]
    rows = [line.split()[0] for line in lines if line.startswith(("job-", "node-"))]
    for what, wanted in (("job-", len(shown.jobs)), ("node-", nodes)):
        there = sum(row.startswith(what) for row in rows)
        command = "atoll jobs" if what == "job-" else "atoll nodes"
        assert there == wanted or any(line.strip() == f"and {wanted - there} more: {command}" for line in lines)
        assert there or not wanted
    living = [row for row in rows if row.startswith("job-")]
    assert living == sorted(living, key=lambda row: int(row[4:]) % 2)


def test_in_a_pipe_it_is_printed_once(runner: CliRunner, controller: ScriptedController) -> None:
    result = runner.invoke(app, ["--controller", controller.address, "top"])
    assert result.exit_code == 0, result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines() if line.startswith(("JOB", "NODE"))] == [
        ["JOB", "PHASE"],
        ["NODE", "ISLAND"],
    ]
