"""deploy/cloud/node as the clouds' tasks run it: on two nodes, which are folders of this machine here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from cluster import wait_until
from held_ports import free_port

CLOUD = Path(__file__).resolve().parents[2] / "deploy/cloud"


def skypilot() -> str:
    return str(yaml.safe_load((CLOUD / "skypilot.yaml").read_text())["run"])


def dstack() -> str:
    """What comes after the installation."""
    install, *then = yaml.safe_load((CLOUD / "atoll.dstack.yml").read_text())["commands"]
    assert install.startswith("pip install ")
    return "\n".join(then)


TOLD = {
    "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "DSTACK_MASTER_NODE_IP": "127.0.0.1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_GPUS_PER_NODE": "1",
}
"""What these services tell the nodes of a task."""


@pytest.fixture
def task(tmp_path: Path) -> dict[str, str]:
    """The environment of a task, with its files in this test's folder, and `atoll` on PATH."""
    atoll = tmp_path / "bin/atoll"
    atoll.parent.mkdir()
    atoll.write_text(f'#!/bin/sh\nexec {sys.executable} -m atoll.cli.main "$@"\n')
    atoll.chmod(0o755)
    env = {**os.environ, "PATH": f"{atoll.parent}:{os.environ['PATH']}", "ATOLL_AUTHORITY": f"{tmp_path}/authority"}
    made = subprocess.run(
        [atoll, "certs", "init", env["ATOLL_AUTHORITY"]], capture_output=True, check=False, timeout=60
    )
    assert made.returncode == 0, made.stderr
    return {**env, **TOLD, "ATOLL_PORT": str(free_port())}


@pytest.mark.parametrize(("service", "ends", "code"), [(skypilot, "badly", 1), (dstack, "well", 0)])
def test_a_cluster_lives_as_long_as_its_job(
    task: dict[str, str], tmp_path: Path, service: Callable[[], str], ends: str, code: int
) -> None:
    """1. Both nodes run what the task file says; each makes its own certificates. 2. Two workers run, one on each. 3.
    The head node ends with the job's exit code, the other one after it, and nothing is left of either."""
    run = service().replace("/tmp/atoll-node", str(CLOUD / "node"))
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    if ends == "badly":
        script.write_text("raise ValueError('as the test asked')\n")
    nodes = []
    for rank in (1, 0):
        ranks = {"SKYPILOT_NODE_RANK": str(rank), "DSTACK_NODE_RANK": str(rank)}
        own = {**ranks, "ATOLL_SCRIPT": str(script), "ATOLL_STATE": f"{tmp_path}/state-{rank}"}
        env = {**task, **own, "ATOLL_WORKERS": "2"}
        with (tmp_path / f"node-{rank}.log").open("wb") as log:
            nodes.append(subprocess.Popen(["bash", "-ec", run], env=env, stdout=log, stderr=log))
    other, head = nodes
    try:
        assert (head.wait(180), other.wait(90)) == (code, 0), (tmp_path / "node-0.log").read_text()
    finally:
        for node in nodes:
            node.terminate()
            node.wait(30)
    said = (tmp_path / "node-0.log").read_text()
    assert ("done" in said) == (code == 0), said

    def left() -> list[int]:
        return [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]

    wait_until("nothing is left of either", lambda: not left(), 30)
    assert (tmp_path / "authority/agent-node-1/cert.pem").exists()


def test_it_is_shell_and_says_how_it_is_used() -> None:
    assert subprocess.run(["bash", "-n", CLOUD / "node"], check=False, timeout=60).returncode == 0
    used = subprocess.run([CLOUD / "node", "0"], capture_output=True, text=True, check=False, timeout=60)
    assert (used.returncode, used.stderr) == (2, "usage: node RANK NODES HEAD SCRIPT [ARG ...]\n")
