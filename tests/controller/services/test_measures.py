"""/metrics: names, the dashboard that draws them, and what a scrape of a real controller gives."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from daemons import controller, leading
from fake_agent import FakeAgent
from held_ports import free_port

from atoll.agent import daemon as of_agents
from atoll.agent.supervisor.settings import AgentSettings
from atoll.controller.services import measures as of_clusters
from atoll.controller.settings import ControllerSettings
from atoll.errors import SettingError
from atoll.telemetry.prometheus import Measurement
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana-atoll.json"
UNITS = ("seconds", "bytes", "ratio", "celsius", "per_second", "total")


def declared() -> list[Measurement]:
    found = [*vars(of_clusters).values(), *vars(of_agents).values()]
    return [one for one in found if isinstance(one, Measurement)]


def test_names_follow_prometheus_and_the_dashboard_draws_all_that_are_there() -> None:
    """Times end with the unit of times, counters with _total, and a label is told only where the measurement has it."""
    names = {one.name: set(one.labels) for one in declared()}
    assert len(names) == len(declared()) > 20
    assert all(re.fullmatch(r"atoll(_[a-z]+)+", name) for name in names)
    assert {name for name in names if re.search(r"(_s|_ms|_bps|_percent|_mb)$", name)} == set()
    dashboard = json.loads(DASHBOARD.read_text())
    drawn: dict[str, set[str]] = {}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"atoll_[a-z_]+", target["expr"])
            told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | set(
                re.findall(r"(\w+)=", target["expr"])
            )
            drawn.setdefault(name, set()).update(told - {"instance"})
    assert drawn.keys() - names.keys() == set()
    assert {name: told - names[name] for name, told in drawn.items() if told - names[name]} == {}
    assert names.keys() - drawn.keys() == {"atoll_agent_devices", "atoll_agent_worker_step", "atoll_job_epoch"}


def test_what_is_not_known_is_left_out() -> None:
    """1. A job without a prediction, an end in sight or an idle link's goodput. 2. The same with all of it."""
    job = pb.Job(id="vit-1", run=2, workers=[pb.WorkerView(rank=1, node="a", links=[common.LinkSample(peer=0)])])
    job.progress.metrics["loss"] = 0.5
    told = {one.name: (value, labels) for one, value, labels in of_clusters.of_jobs([job])}
    assert told["atoll_job_reported"] == (0.5, ("vit-1", "loss"))
    assert told["atoll_job_runs_total"] == (2, ("vit-1",))
    unknown = {"atoll_job_predicted_step_seconds", "atoll_job_left_seconds", "atoll_link_goodput_bytes_per_second"}
    assert not unknown & told.keys()
    job.plan.predicted_step_s, job.progress.left_s, job.workers[0].links[0].goodput_bps = 0.1, 60.0, 8e6
    told = {one.name: (value, labels) for one, value, labels in of_clusters.of_jobs([job])}
    assert told["atoll_link_goodput_bytes_per_second"] == (1e6, ("vit-1", "1", "0"))
    assert told.keys() >= unknown


async def test_a_controller_is_scraped(etcd: str, tmp_path: Path) -> None:
    """1. It leads, has a node and a job that waits for another one. 2. A port that is in use is refused by name."""
    if find_spec("prometheus_client") is None:
        pytest.skip("prometheus-client is not here: /metrics was NOT tested (make setup installs it)")
    address = f"127.0.0.1:{free_port()}"
    async with controller(tmp_path / "first", etcd, metrics=address) as head:
        await leading(head)
        a = await FakeAgent("a").connect(head.address)
        await head.submit((2, 2))
        text = await asyncio.to_thread(_scraped, address)
        for line in (
            "atoll_controller_leading 1.0",
            'atoll_jobs{phase="queued"} 1.0',
            'atoll_nodes{state="connected"} 1.0',
        ):
            assert line in text.splitlines()
        assert "# TYPE atoll_job_runs_total counter" in text
        assert "process_resident_memory_bytes" in text
        with pytest.raises(SettingError, match="the port is in use"):
            async with controller(tmp_path / "second", etcd, metrics=address):
                pass
        await a.disconnect()


@pytest.mark.parametrize("made", [ControllerSettings, AgentSettings])
def test_beyond_this_machine_nothing_is_told_unasked(made: Any, tmp_path: Path) -> None:
    needed = {"data_dir": tmp_path} if made is ControllerSettings else {"state_dir": tmp_path, "controllers": ("h:1",)}
    with pytest.raises(SettingError, match=r"metrics = .*0\.0\.0\.0:9000.* is reachable from other machines"):
        made(**needed, metrics="0.0.0.0:9000")
    with pytest.raises(SettingError, match=r"metrics = '127\.0\.0\.1' names no port.*HOST:PORT"):
        made(**needed, metrics="127.0.0.1")


def _scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())
