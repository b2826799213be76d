"""Jobs whose workers cannot dial each other: through the relay that the controller starts by itself."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from behind_nat import Sites, why_not
from cluster import Cluster, hurry, kill, trained_samples, wait_until
from held_ports import free_port

from atoll.cli.render.views import status_lines
from atoll.v1 import jobs_pb2 as pb

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=f"NO TEST OF NAT HERE: {WHY_NOT}")


@pytest.fixture
def sites() -> Iterator[Sites]:
    with Sites(2) as made:
        yield made


@pytest.fixture
def far(cluster: Cluster, sites: Sites) -> Cluster:
    """A controller here, an agent in each of two sites, the first of which says that it is behind NAT."""
    port = free_port()
    cluster.addresses.append(f"127.0.0.1:{port}")
    folder = cluster.folder
    data = ("--data-dir", str(folder / "controller"))
    cluster.atoll("controller", "controller", "--listen", f"0.0.0.0:{port}", "--insecure", *data)
    for site, name in enumerate(("home", "lab")):
        cluster.start(
            name,
            (
                *sites.inside(site), sys.executable, "-m", "atoll.cli.main", "agent", "--controller",
                f"{sites.here(site)}:{port}", "--name", name, "--threads", "1", "--state-dir", str(folder / name),
                "--jobs-dir", str(folder / "jobs"), *(("--behind-nat",) if site == 0 else ("--island", "lab")),
            ),
        )  # fmt: skip
    cluster.wait_for_nodes(2)
    return cluster


def relay_of(cluster: Cluster) -> psutil.Process | None:
    children = psutil.Process(cluster.processes["controller"].pid).children()
    return next((child for child in children if "relay" in child.cmdline()), None)


def test_a_job_trains_through_the_relay_and_goes_on_when_that_is_killed(
    far: Cluster, sites: Sites, tmp_path: Path
) -> None:
    """1. Neither site reaches the other. 2. A job of local-steps trains. 3. The relay dies (SIGKILL). 4. The
    controller starts it again and the job goes on in place, on the same step. 5. Every sample counted once."""
    reach = "import socket, sys; s = socket.socket(); s.settimeout(1); sys.exit(s.connect_ex((sys.argv[1], 9)) != 111)"
    for site in (0, 1):
        far.start(f"dial-{site}", (*sites.inside(site), sys.executable, "-c", reach, sites.address(1 - site)))
        assert far.processes[f"dial-{site}"].wait(30) == 1  # not even refused
    out = tmp_path / "out"
    options = ("--out", str(out), "--epochs", "2", "--step-s", "0.1")
    job = far.submit("tiny.py", *options, workers=(2, 2))  # begins by local-steps
    far.wait_for_step(job, 12)
    assert "(behind NAT) go through the relay" in far.story(job)
    shown = "\n".join(status_lines(far.client.get(job), 0.0))
    assert "(behind NAT in home), from and to other islands" in shown
    nodes = {node.name: node for node in far.client.nodes().nodes}
    assert (nodes["home"].behind_nat, nodes["home"].island) == (True, "home")
    assert not nodes["lab"].behind_nat
    relay = relay_of(far)
    assert relay is not None
    kill(relay.pid)
    far.wait_for(job, "view 2 in force", lambda seen: "continued in place" in far.story(job))
    hurry(out)
    seen = far.wait_for_end(job)
    assert (seen.phase, seen.run) == (pb.PHASE_DONE, 1), far.story(job)
    for steps in trained_samples(out).values():
        assert sorted(sample for ids in steps.values() for sample in ids) == list(range(600))


def test_strategy_dense_is_refused_by_name_and_strangers_get_nothing_from_the_relay(far: Cluster) -> None:
    job = far.submit("tiny.py", "--out", str(far.folder / "out"), workers=(2, 2), strategy="dense")
    seen = far.wait_for(job, "why it waits", lambda seen: "goes through no relay" in seen.reason)
    assert "strategy dense" in seen.reason
    assert "home" in seen.reason
    assert "local-steps" in seen.reason
    far.client.cancel(job)
    relay = wait_until("a relay", lambda: relay_of(far), 30)
    assert relay is not None

    def listens() -> list[int]:
        return [one.laddr.port for one in relay.net_connections("tcp") if one.status == psutil.CONN_LISTEN]

    (port,) = wait_until("the relay's port", listens, 30)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.recv(32, socket.MSG_WAITALL)
        said = b'{"node": "lab", "want": "stand-by", "to": "", "link": "", "note": "", "proof": "00"}'
        stranger.sendall(len(said).to_bytes(4) + said)
        assert b"refused" in stranger.recv(4096)
