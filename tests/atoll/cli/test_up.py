"""up and the daemons' shells: children that die, are stopped, outlive nobody; signals; ports; tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from held_ports import free_port
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.agent.telemetry import devices
from atoll.agent.telemetry.devices import Device
from atoll.cli.cluster import local_cluster
from atoll.cli.cluster.background import locked
from atoll.cli.cluster.local_cluster import LocalCluster, dealt
from atoll.cli.commands.daemons import need, read_token
from atoll.cli.commands.up import check_port, parse_speeds
from atoll.cli.main import app
from atoll.errors import AtollError, BadInput, DeadlineExceeded
from atoll.v1 import jobs_pb2 as pb


def test_speeds_and_agents_must_agree() -> None:
    assert parse_speeds(None, None) == [1.0]
    assert parse_speeds(None, 3) == [1.0, 1.0, 1.0]
    assert parse_speeds("1,0.6,0.3", None) == [1.0, 0.6, 0.3]
    for speeds, agents, said in (
        ("1,x", None, "are not numbers"),
        ("1,,1", None, "are not numbers"),
        ("0,1", None, "above 0"),
        ("nan", None, "above 0"),
        ("1,1", 3, "names 2 agents but --agents 3"),
        (",".join(["1"] * 65), None, "At most 64"),
    ):
        with pytest.raises(BadInput, match=said):
            parse_speeds(speeds, agents)


@pytest.mark.parametrize(
    ("gpus", "agents", "parts"),
    [
        ("01234567", 1, ["01234567"]),
        ("01234567", 3, ["01", "234", "567"]),
        ("01", 2, ["0", "1"]),
        ("0", 3, ["", "", ""]),
        ("", 2, ["", ""]),
    ],
)
def test_no_gpu_is_given_to_two_agents(gpus: str, agents: int, parts: list[str]) -> None:
    """Three agents on one machine registered its only GPU three times, and three workers shared it. With fewer GPUs
    than agents all train on the CPU: a job's workers are of one kind."""
    assert ["".join(part) for part in dealt(list(gpus), agents)] == parts


@pytest.mark.parametrize(
    ("gpus", "agents", "parts"),
    [("0", 3, ["0", "0", "0"]), ("01", 3, ["0", "0", "1"]), ("01", 2, ["0", "1"]), ("012", 2, ["0", "12"])],
)
def test_agents_share_gpus_where_there_are_fewer(gpus: str, agents: int, parts: list[str]) -> None:
    assert ["".join(part) for part in dealt(list(gpus), agents, share=True)] == parts


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        (["--share-gpu"], 0, "error: --share-gpu: there is no GPU here (see `atoll doctor`). Leave it out: "),
        (["--share-gpu", "--detach"], 0, "error: --share-gpu: there is no GPU here (see `atoll doctor`). Leave it out"),
        (
            [],
            1,
            "1 GPU for 3 agents: they train on the CPU. `--share-gpu` lets them share, `--agents 1` gives each its",
        ),
    ],
)
def test_too_few_gpus_are_one_line(  # noqa: PLR0917
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], gpus: int, said: str
) -> None:
    found = [Device(0, "cuda", "RTX", 1, 1.0, visible_as="0")] if gpus else [Device(0, "cpu", "Xeon", 1, 1.0)]
    monkeypatch.setattr(devices, "find_devices", lambda: found)
    taken = socket.create_server(("127.0.0.1", 0))  # so that none comes up
    with taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--agents", "3", "--data-dir", str(tmp_path), "--listen", listen]
        result = runner.invoke(app, ["up", *options, *arguments])
    first, *more = result.stderr.splitlines()
    assert first.startswith(said)
    assert len(more) == (0 if "--share-gpu" in arguments else 1), result.stderr


async def variables_of(pid: int) -> dict[str, str]:
    """Of a process, which for a moment has none while it becomes another program."""
    async with asyncio.timeout(30):
        while not (found := psutil.Process(pid).environ()):  # noqa: ASYNC110 - the kernel's
            await asyncio.sleep(0.01)
    return found


async def test_an_agent_sees_its_own_gpus_alone(tmp_path: Path) -> None:
    """1. Two agents are started, with GPUs 2 and 3 for the second. 2. That is what CUDA_VISIBLE_DEVICES leaves each."""
    (tmp_path / "logs").mkdir()
    cluster = LocalCluster(tmp_path, "127.0.0.1:1", [1.0, 1.0], [[], ["2", "3"]], threads=1)
    try:
        await cluster.start()
        seen = {
            child.name: (await variables_of(child.process.pid)).get("CUDA_VISIBLE_DEVICES")
            for child in cluster._children[1:]
        }
    finally:
        await cluster.stop()
    assert seen == {"agent-0": "", "agent-1": "2,3"}


def test_a_port_that_is_taken_is_named() -> None:
    port = free_port()  # once it is not taken any more, nobody else takes it
    address = f"127.0.0.1:{port}"
    refused = pytest.raises(BadInput, match=f"cannot listen on {address}: Address already in use")
    with socket.create_server(("127.0.0.1", port)), refused:
        check_port(address)
    check_port(address)


@pytest.mark.parametrize("listen", ["0.0.0.0:7700", "10.0.0.1:7700", "127.0.0.1:0"])
def test_up_is_for_one_machine(listen: str) -> None:
    with pytest.raises(BadInput, match="serves this machine only"):
        check_port(listen)


def test_two_ups_on_one_folder_are_refused(tmp_path: Path) -> None:
    mine = locked(tmp_path, "127.0.0.1:1", [1.0, 0.5])
    refused = pytest.raises(AtollError, match="`atoll up` runs already on .* with 2 agents at 127.0.0.1:1. `atoll down")
    with mine, refused, locked(tmp_path, "127.0.0.1:2", [1.0]):
        pass
    with locked(tmp_path, "127.0.0.1:2", [1.0]):
        pass


def cluster_in(folder: Path, listen: str = "127.0.0.1:1", agents: int = 1) -> LocalCluster:
    (folder / "logs").mkdir()
    return LocalCluster(folder, listen, [1.0] * agents, [[]] * agents, threads=1)


async def test_a_child_that_ends_is_reported_with_its_last_line(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    await cluster._spawn("agent-0", ["jobs", "--nope"])
    with pytest.raises(AtollError, match=r"^agent-0 ended with exit code 2: No such option: --nope.*agent-0\.log$"):
        await asyncio.wait_for(cluster.watch_children(), 30)
    await cluster.stop()


async def test_children_are_of_this_installation_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. `atoll up` of a wheel ran in a clone of the project. 2. Its children imported the clone's `atoll`, which has
    no generated code, and ended."""
    (tmp_path / "atoll.py").write_text("raise SystemExit('this is not the installed one')\n")
    monkeypatch.chdir(tmp_path)
    cluster = cluster_in(tmp_path)
    await cluster._spawn("agent-0", ["version"])
    with pytest.raises(AtollError, match=r"^agent-0 ended with exit code 0"):
        await asyncio.wait_for(cluster.watch_children(), 30)
    await cluster.stop()


async def test_a_child_that_is_killed_is_reported(tmp_path: Path, controller: ScriptedController) -> None:
    cluster = cluster_in(tmp_path)
    await cluster._spawn("agent-0", ["events", "-f", "--controller", controller.address])
    await asyncio.to_thread(controller.wait_for, lambda script: "Events" in script.calls)
    cluster._children[0].process.kill()
    with pytest.raises(AtollError, match=r"^agent-0 was killed by signal 9"):
        await asyncio.wait_for(cluster.watch_children(), 30)
    await cluster.stop()


async def test_children_that_do_not_stop_are_killed_in_time(
    tmp_path: Path, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "_STOP_WITHIN_S", 4.5)
    cluster = cluster_in(tmp_path)
    await cluster._spawn("controller", ["events", "-f", "--controller", controller.address])
    await cluster._spawn("agent-0", ["events", "-f", "--controller", controller.address])
    await asyncio.to_thread(controller.wait_for, lambda script: script.calls.count("Events") == 2)
    for child in cluster._children:
        child.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(30):
            while psutil.Process(child.process.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - the kernel's
                await asyncio.sleep(0.01)
    async with asyncio.timeout(10):  # as is promised
        await cluster.stop()
    assert [child.process.returncode for child in cluster._children] == [-signal.SIGKILL, -signal.SIGKILL]


async def test_ready_is_said_when_all_agents_are_connected(
    tmp_path: Path, controller: ScriptedController, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster_in(tmp_path, controller.address, agents=2)
    waiting = asyncio.create_task(cluster.announce_when_ready())
    for number in (0, 1):
        await asyncio.to_thread(controller.wait_for, lambda script: script.calls)
        assert not waiting.done()
        controller.script.nodes.nodes.append(pb.Node(name=f"local-{number}", connected=True))
        controller.script.calls.clear()
    await asyncio.wait_for(waiting, 30)
    out, err = capsys.readouterr()
    assert out == f"ready: 2 agents, controller {controller.address}\n"
    assert f"atoll run train.py --controller {controller.address}" in err


async def test_agents_that_do_not_come_are_counted(
    tmp_path: Path, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "READY_WITHIN_S", 3.0)  # in which it is asked once at least
    controller.script.nodes.nodes.append(pb.Node(name="local-0", connected=True))
    cluster = cluster_in(tmp_path, controller.address, agents=2)
    (tmp_path / "logs" / "agent-1.log").write_text("error: no room\n\n")
    refused = r"1 of 2 agents connected within 3 s. local-1 is missing, and wrote last: no room\. Their logs: "
    with pytest.raises(DeadlineExceeded, match=refused):
        await cluster.announce_when_ready()


def test_children_die_with_an_up_that_is_killed(controller: ScriptedController) -> None:
    code = (
        "import subprocess, sys; from atoll.host import die_with_parent; "
        "subprocess.run(die_with_parent.command([sys.executable, '-m', 'atoll.cli.main', 'events', '-f']))"
    )
    environment = {**os.environ, "ATOLL_CONTROLLER": controller.address}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        controller.wait_for(lambda script: "Events" in script.calls)
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone == [child]


def test_what_an_extra_would_bring_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_etcd.py").write_text("import scipy_of_nobody\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=r"^scipy_of_nobody is not installed. pip install 'atoll\[controller\]'$"):
        need("needs_etcd", "controller")
    with pytest.raises(ModuleNotFoundError):
        need("atoll.nothing_of_the_kind", "controller")


def test_tokens_come_from_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    path.chmod(0o600)
    assert read_token(path) == "s3cret"
    path.chmod(0o640)
    with pytest.raises(BadInput, match="may be read by others"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(BadInput, match="holds 0 characters"):
        read_token(path)


def test_certs_by_command(runner: CliRunner, tmp_path: Path) -> None:
    assert runner.invoke(app, ["certs", "init", "ca"]).stdout == "ca\n"
    result = runner.invoke(app, ["certs", "server", "ca", "--host", "::1", "--host", "head.lab"])
    assert result.stdout == "ca/controller-1\n"
    assert runner.invoke(app, ["certs", "client", "ca", "ann"]).stdout == "ca/client-ann\n"
    result = runner.invoke(app, ["certs", "agent", "ca", "gpu-1"])
    assert result.stdout == "ca/agent-gpu-1\n"
    assert "ATOLL_TLS_DIR=ca/agent-gpu-1" in result.stderr
    again = runner.invoke(app, ["certs", "init", "ca"])
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr.startswith("error: ca/ca.pem is there already")
    missing = runner.invoke(app, ["certs", "server", "ca"])
    assert (missing.exit_code, "Missing option '--host'" in missing.stderr) == (2, True)
