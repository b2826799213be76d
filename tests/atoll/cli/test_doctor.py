"""doctor: what it finds wrong, and what it says to do about it."""

from __future__ import annotations

import datetime
import io
import json
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.agent.telemetry.devices import Device
from atoll.cli.checks import cluster, machine
from atoll.cli.checks.cluster import check_certificates, check_cluster, check_reach, judge_cluster
from atoll.cli.checks.machine import Card, cards_finding, check_machine, judge_etcd, judge_kernels, numa_finding
from atoll.cli.cluster.connection import Connection
from atoll.cli.main import app
from atoll.cli.render.findings import Finding
from atoll.controller.state.etcd_binary import EtcdBinary
from atoll.kernels.cuda_device import NoCode
from atoll.security import certificates
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking torch takes seconds; one test does it for real."""
    monkeypatch.setattr(machine, "_ASK_TORCH", "print('[\"2.13.0\", null, false, 0]')")


@pytest.mark.usefixtures("no_torch")
def test_a_healthy_machine_without_cluster_is_no_failure(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["--timeout", "0.2", "doctor", "--json", "--data-dir", str(tmp_path / "not/yet")])
    document = json.loads(result.stdout)
    assert [finding["subject"] for finding in document["findings"]] == [
        *(
            "python",
            "kernels",
            "torch",
            "gpus",
            "numa",
            "zmq",
            "etcd",
            "disk",
            "memory",
            "open files",
            "/dev/shm",
            "controller",
        ),
    ]
    assert set(document["findings"][0]) == {"subject", "verdict", "found", "next_step"}
    assert document["healthy"] == (result.exit_code == 0)


@pytest.mark.usefixtures("no_torch")
def test_a_controller_that_was_named_and_is_not_there_is_exit_1(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--controller", "127.0.0.1:1", "--timeout", "0.2", "doctor"])
    assert result.exit_code == 1
    assert "no leading controller at 127.0.0.1:1" in result.stdout
    assert "controller: see its log" in result.stderr


def test_torch_is_asked_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported it more often than not: a new one takes seconds of a processor."""

    run = subprocess.run

    def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[-1] != machine._ASK_TORCH:
            return run(command, **options)
        (tmp_path / "asked.py").write_text(command[-1])
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(tmp_path / "asked.py"))
        return subprocess.CompletedProcess(command, 0, printed.getvalue())

    monkeypatch.setattr(machine.subprocess, "run", run_here)
    found = next(finding for finding in check_machine(tmp_path) if finding.subject == "torch")
    assert found.verdict == "ok"
    assert found.found.startswith("2.")


def test_torch_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_ASK_TORCH", "raise OSError('libcudart.so.12: cannot open')")
    found = next(finding for finding in check_machine(tmp_path) if finding.subject == "torch")
    assert found == Finding(
        "torch", "broken", "import failed: OSError: libcudart.so.12: cannot open", "reinstall torch"
    )


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ((3, 4, 21), "warning"),
        ((3, 4, 23), "ok"),
        ((3, 5, 1), "warning"),
        ((3, 5, 6), "warning"),
        ((3, 5, 20), "ok"),
        ((3, 6, 0), "ok"),
    ],
)
def test_which_etcd_is_trusted(version: tuple[int, int, int], verdict: str) -> None:
    assert judge_etcd(EtcdBinary(Path("etcd"), version)).verdict == verdict


def test_no_gpu_is_a_normal_case() -> None:
    assert cards_finding("no NVIDIA driver").verdict == "info"
    assert cards_finding(0).verdict == "info"
    there = cards_finding(2)
    assert (there.verdict, there.next_step) == ("info", "from a clone of the repository: make gpu-check")
    assert there.found.startswith("2 NVIDIA devices; ")


def test_numa_nodes_of_devices() -> None:
    gpus = [Device(index, "cuda", "x", 1, 1.0, numa_node=node) for index, node in enumerate((0, 1, None))]
    found = numa_finding({0: range(4), 1: range(4, 8)}, gpus)
    assert found.found == (
        "workers are bound: device 0 node 0 (4 threads), device 1 node 1 (4 threads); "
        "not bound, their node is not known or not allowed: 2"
    )
    assert numa_finding({0: range(4)}, gpus).found == "nodes: 1, devices: 3; workers use all processors"


def reply(**fields: object) -> pb.ListNodesReply:
    nodes = [pb.Node(name="a", connected=True, devices=[common.Device()], version="0.1.0")]
    return pb.ListNodesReply(nodes=nodes, controller="head:7700", version="0.1.0", unix_s=1000.0, **fields)  # type: ignore[arg-type]


def test_a_healthy_cluster_has_nothing_to_do() -> None:
    assert judge_cluster(reply(), "0.1.0", 1000.4) == [
        Finding("agents", "ok", "1 connected with 1 devices"),
        Finding("versions", "ok", "0.1.0 everywhere"),
        Finding("clock", "ok", "0.4 s ahead of the controller's"),
    ]


def test_lost_agents_other_versions_and_a_clock_a_day_off_are_named() -> None:
    seen = reply()
    seen.nodes.append(pb.Node(name="b", connected=False, seen_s_ago=70, version="0.0.9"))
    agents, versions, clock = judge_cluster(seen, "0.1.0", 1000.0 - 86_400)
    assert (agents.verdict, agents.found) == ("warning", "1 connected with 1 devices; lost: b (silent for 70 s)")
    assert (versions.verdict, versions.found) == ("warning", "here 0.1.0, but b 0.0.9")
    assert (clock.verdict, clock.found) == ("warning", "86400.0 s behind the controller's")
    assert all(finding.next_step for finding in (agents, versions, clock))


def test_who_leads_is_said(controller: ScriptedController) -> None:
    controller.script.nodes = reply()
    first, *rest = check_cluster(Connection((controller.address,), None, 30.0))
    assert first.verdict == "ok"
    assert first.found.startswith("head:7700 leads, answered in ")
    assert [finding.subject for finding in rest] == ["agents", "versions", "clock", "reach"]


@pytest.fixture
def heard_late(monkeypatch: pytest.MonkeyPatch, dials: bool) -> None:
    """A busy machine may hear of being dialled later than others."""
    if dials:
        monkeypatch.setattr(cluster, "_ARRIVES_S", 30.0)


@pytest.mark.usefixtures("heard_late")
@pytest.mark.parametrize(
    ("seen_at", "dials", "verdict", "words"),
    [
        ("127.0.0.1", True, "info", "the controller is on this machine"),
        ("198.51.100.7", True, "ok", "the controller dials this machine at 198.51.100.7"),
        ("198.51.100.7", False, "info", "sees 198.51.100.7, and cannot dial this machine there"),
    ],
)
def test_whether_others_can_dial_this_machine(
    controller: ScriptedController, seen_at: str, dials: bool, verdict: str, words: str
) -> None:
    """The controller's words are not what counts: it was dialled, or it was not."""
    controller.script.seen_at, controller.script.dials = seen_at, dials
    (found,) = check_reach(Connection((controller.address,), None, 30.0))
    assert (found.verdict, words in found.found) == (verdict, True), found
    assert ("--behind-nat" in found.next_step) is not dials


def test_a_controller_that_knows_no_dialling_back_is_no_finding(controller: ScriptedController) -> None:
    controller.script.refuse = grpc.StatusCode.UNIMPLEMENTED
    assert check_reach(Connection((controller.address,), None, 30.0)) == []


def test_certificates_that_expire_or_belong_to_another_cluster(tmp_path: Path) -> None:
    certificates.create_authority(tmp_path / "a", NOW - datetime.timedelta(days=400))
    certificates.create_authority(tmp_path / "b", NOW)

    def judged(days_ago: int) -> Finding:
        made = NOW - datetime.timedelta(days=days_ago)
        tls = certificates.identity(certificates.issue(tmp_path / "a", "client", f"ann-{days_ago}", [], made))
        return check_certificates(Connection(("h:1",), tls, 1.0))[0]

    assert [judged(days).verdict for days in (0, 350, 366)] == ["ok", "warning", "broken"]
    own = certificates.issue(tmp_path / "a", "client", "moved", [], NOW)
    (own / "ca.pem").write_bytes((tmp_path / "b/ca.pem").read_bytes())
    found = check_certificates(Connection(("h:1",), certificates.identity(own), 1.0))[0]
    assert (found.verdict, "not signed by" in found.found) == ("broken", True)
    (own / "key.pem").unlink()
    assert check_certificates(Connection(("h:1",), certificates.identity(own), 1.0))[0].verdict == "broken"
    assert check_certificates(Connection(("h:1",), None, 1.0)) == []


def test_kernels_that_cannot_use_a_gpu_are_no_ok() -> None:
    """Beside GPUs "ok, CPU only" was all that was said of a build without nvcc, or of an old driver."""
    v100, a100, other = Card(0, "Tesla V100", (7, 0)), Card(1, "A100", (8, 0)), Card(2, "Tesla V100", (7, 0))
    assert judge_kernels("avx2", 0, {}) == Finding("kernels", "ok", "avx2, CPU only")
    assert judge_kernels("avx2", 2, {}) == Finding("kernels", "ok", "avx2, with CUDA")
    old = NoCode("needs 7.5, the device has 7.0", "use CUDA 12")
    one = judge_kernels("avx2", 3, {v100: old, other: old})
    assert (one.verdict, one.next_step) == ("warning", "use CUDA 12")
    assert "the device has 7.0, so kernels of GPU 0 (Tesla V100), 2 (Tesla V100) run on the CPU" in one.found
    several = judge_kernels("avx2", 3, {v100: old, a100: NoCode("an old driver", "update it")})
    assert several.next_step == "use CUDA 12; update it"


def test_the_doctor_reads_the_capability_of_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    names, ended = ["Tesla V100", "A100"], []
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: ended.append(True),
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=names.__getitem__,
        nvmlDeviceGetCudaComputeCapability=[(7, 0), (8, 0)].__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine._cards() == [Card(0, "Tesla V100", (7, 0)), Card(1, "A100", (8, 0))]
    assert ended == [True]
