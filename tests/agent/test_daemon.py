"""Workers as a controller sees them: real processes, launched, watched and stopped over a real stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from agent_harness import RunningAgent, ScriptedController, children, is_alive, until
from held_ports import free_port

from atoll.agent import daemon
from atoll.agent.supervisor.processes.leftover_processes import PidFile
from atoll.agent.supervisor.settings import AgentSettings
from atoll.v1 import agents_pb2, common_pb2

FOREVER = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\ntime.sleep(600)\n"


async def test_agent_tells_what_it_has(agent: RunningAgent, controller: ScriptedController) -> None:
    register = controller.registers[0]
    assert (register.name, register.island, register.address) == ("node-a", "", "127.0.0.1")
    assert [d.index for d in register.devices] == list(range(len(register.devices)))
    assert register.devices[0].memory_bytes > 0
    assert register.memory_bytes > 0
    assert register.protocol == 1
    assert len(set(register.rendezvous_ports)) == 4
    assert all(20_000 <= port <= 31_999 for port in register.rendezvous_ports)


async def test_agent_tells_how_its_devices_do(agent: RunningAgent, controller: ScriptedController) -> None:
    devices = controller.registers[0].devices
    own = {device.index for device in devices}
    await until("two samples of each", lambda: len(controller.samples) >= 2 * len(own))
    assert {sample.index for sample in controller.samples} == own
    assert all(0 < sample.memory_used_bytes <= devices[sample.index].memory_bytes for sample in controller.samples)
    assert all(0 <= sample.utilisation <= 1 for sample in controller.samples)


async def test_worker_is_started_as_torchrun_would_and_its_end_is_reported(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    port = controller.ports[0]
    script = "import json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv, os.getcwd()]))\n"
    spec = {"args": ["--lr", "0.1"], "env": {"RANK": "9", "ATOLL_JOB": "evil", "COLOUR": "blue"}}
    launch = controller.launch(script, world_size=3, run=2, node_rank=1, spec=spec)
    ended = await until("the worker's end", lambda: controller.has_exited(run=2))
    assert ended.exit_kind == common_pb2.EXIT_KIND_FINISHED, ended.reason
    await until("its output", lambda: controller.printed(run=2).endswith(b"\n"))
    env, argv, folder = json.loads(controller.printed(run=2))
    assert ended.exit_kind == common_pb2.EXIT_KIND_FINISHED
    assert ended.exit_code == 0
    wanted = {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "job-1",
        "TORCHELASTIC_RESTART_COUNT": "1", "ATOLL_JOB": "job-1", "ATOLL_RUN": "2", "COLOUR": "blue",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    assert {name: env.get(name) for name in wanted} == wanted
    assert env["ATOLL_AGENT_SOCKET"].startswith("ipc://")
    assert len(env["ATOLL_AGENT_SOCKET"]) < 100
    assert argv == ["train.py", "--lr", "0.1"]
    assert Path(folder).name == launch.spec.code_sha256
    assert (agent.settings.jobs / "job-1").is_dir()


@pytest.mark.parametrize(
    ("script", "kind", "code", "reason"),
    [
        ("raise ValueError('no such layer')", common_pb2.EXIT_KIND_FAILED, 1, "ValueError: no such layer"),
        ("import sys; print('bye'); sys.exit(7)", common_pb2.EXIT_KIND_FAILED, 7, "exit code 7, its last line: bye"),
        ("import sys; sys.exit(75)", common_pb2.EXIT_KIND_PEER_LOST, 75, "a peer of its run was lost"),
        ("import sys; sys.exit(85)", common_pb2.EXIT_KIND_DRAINED, 85, "stopped at a step boundary, as requested"),
        (
            "import os; os.kill(os.getpid(), 9)",
            common_pb2.EXIT_KIND_SIGNALLED,
            -9,
            "killed by signal 9 (SIGKILL)",
        ),
    ],
)
async def test_every_end_has_a_kind_and_a_reason(  # noqa: PLR0917
    agent: RunningAgent, controller: ScriptedController, script: str, kind: int, code: int, reason: str
) -> None:
    controller.launch(script)
    ended = await until("the worker's end", controller.has_exited)
    assert (ended.exit_kind, ended.exit_code, ended.reason) == (kind, code, reason)


async def test_the_runs_keys_reach_the_worker_by_its_socket_alone(
    agent: RunningAgent, controller: ScriptedController, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by its environment or arguments, which others on the machine can read, and no log tells them."""
    caplog.set_level("DEBUG")
    secret = b"correct-horse-battery-staple-321"
    script = (
        "import os, sys\n"
        "from atoll.agent.runtime.agent_link.link import AgentLink\n"
        "from atoll.agent.runtime.agent_link.place import WorkerPlace\n"
        "print(dict(os.environ), sys.argv)\n"
        "place = WorkerPlace.from_environment()\n"
        "link = AgentLink(place, place.agent)\n"
        "launch = link.welcome.launch\n"
        "link.close()\n"
        "print(len(launch.members), launch.members[0].island, launch.keys.secret[::-1])\n"
    )
    controller.launch(
        script,
        spec={"strategy": "stale-sparse"},
        members=[agents_pb2.Member(rank=0, node="node-a", island="lyon")],
        keys=agents_pb2.DataKeys(secret=secret, public=[bytes(32)]),
    )
    ended = await until("the worker's end", controller.has_exited)
    assert ended.exit_kind == common_pb2.EXIT_KIND_FINISHED, ended.reason
    await until("its output", lambda: f"1 lyon {secret[::-1]!r}\n".encode() in controller.printed())
    kept = [path.read_bytes() for path in agent.settings.state_dir.rglob("*") if path.is_file()]
    for text in (caplog.text.encode(), controller.printed(), *kept):
        assert secret not in text
        assert b"horse" not in text


async def test_repeated_launch_makes_no_second_worker(agent: RunningAgent, controller: ScriptedController) -> None:
    launch = controller.launch(FOREVER)
    pid = await until("the worker runs", controller.is_running)
    for _ in range(3):
        controller.send(launch=launch)
    controller.launch("print('other')", rank=1)
    await until("the messages after it are obeyed", lambda: controller.has_exited(rank=1))
    assert controller.is_running() == pid
    # On a slow machine a process waits for launches by now.
    files = (agent.settings.state_dir / "pids").glob("spare-*")
    spares = {facts[0] for path in files if (facts := PidFile(path).read())}
    assert {child.pid for child in children()} - spares == {pid}


async def test_newer_run_ends_the_older_and_the_older_never_comes_back(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    older = controller.launch(STUBBORN, run=1)
    old_pid = await until("run 1", controller.is_running)
    controller.launch(f"import os, time\nprint(os.path.exists('/proc/{old_pid}'))\ntime.sleep(600)", run=2)
    new_pid = await until("run 2", lambda: controller.is_running(run=2))
    await until("its output", lambda: controller.printed(run=2).endswith(b"\n"))
    assert controller.printed(run=2) == b"False\n", "run 1 is dead before run 2 begins"
    ended = controller.has_exited(run=1)
    assert ended is not None
    assert ended.exit_kind == common_pb2.EXIT_KIND_STOPPED
    assert ended.reason == "run 2 of its job replaces it"
    controller.send(forget=agents_pb2.Forget(id=older.id))
    controller.send(launch=older)
    await until("it is forgotten", lambda: controller.status(run=1) is None)
    controller.launch("", job="other")
    await until("the messages after it are obeyed", lambda: controller.has_exited(job="other"))
    assert controller.status(run=1) is None
    assert controller.is_running(run=2) == new_pid


async def test_stop_goes_from_sigterm_to_sigkill(agent: RunningAgent, controller: ScriptedController) -> None:
    controller.launch(
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(3))\nprint('ready')\ntime.sleep(600)"
    )
    controller.launch(STUBBORN, rank=1)
    await until("both are ready", lambda: controller.printed() and controller.printed(rank=1))
    controller.send(stop=agents_pb2.StopWorkers(job="job-1", run=1, grace_s=60, reason="cancelled"))
    polite = await until("rank 0 ends on SIGTERM", controller.has_exited)
    assert (polite.exit_kind, polite.exit_code, polite.reason) == (common_pb2.EXIT_KIND_STOPPED, 3, "cancelled")
    controller.send(stop=agents_pb2.StopWorkers(job="job-1", run=1, grace_s=0.1))  # it has had its time
    stubborn = await until("rank 1 ends on SIGKILL", lambda: controller.has_exited(rank=1))
    assert (stubborn.exit_kind, stubborn.exit_code) == (common_pb2.EXIT_KIND_STOPPED, -signal.SIGKILL)
    assert stubborn.reason.startswith("cancelled (killed")


async def test_stopped_process_counts_as_dead(agent: RunningAgent, controller: ScriptedController) -> None:
    controller.launch(FOREVER)
    pid = await until("the worker runs", controller.is_running)
    os.kill(pid, signal.SIGSTOP)
    ended = await until("the worker's end", controller.has_exited, 30)
    assert ended.exit_kind == common_pb2.EXIT_KIND_UNRESPONSIVE
    assert "SIGSTOP" in ended.reason


async def test_what_a_worker_started_ends_with_it(agent: RunningAgent, controller: ScriptedController) -> None:
    """Its output ends too, although a grandchild that left the process group holds the pipe."""
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    controller.launch(
        f"import subprocess\nfor away in (False, True):\n"
        f"    print(subprocess.Popen({child!r}, start_new_session=away).pid)"
    )
    ended = await until("the worker's end", controller.has_exited)
    await until("its output", lambda: controller.printed().count(b"\n") == 2)
    near, far = map(int, controller.printed().split())
    try:
        assert ended.exit_kind == common_pb2.EXIT_KIND_FINISHED
        # Both have got SIGKILL by then; when they are gone is the kernel's.
        await until("nothing of the job is left", lambda: not is_alive(near) and not is_alive(far))
    finally:
        if is_alive(far):
            os.kill(far, signal.SIGKILL)


async def test_code_is_fetched_once_and_a_missing_script_is_told(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    for rank in range(3):
        controller.launch("print('hello')", rank=rank, world_size=3)
    for rank in range(3):
        await until(f"rank {rank} ends", lambda rank=rank: controller.has_exited(rank=rank))
    assert controller.fetches == 1
    controller.launch("", job="job-2", spec={"script": "absent.py"})
    ended = await until("it is refused", lambda: controller.has_exited(job="job-2"))
    assert ended.exit_kind == common_pb2.EXIT_KIND_NOT_STARTED
    assert "absent.py" in ended.reason
    assert "train.py" in ended.reason


async def test_launch_that_makes_no_sense_is_told_by_its_field(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    controller.launch(FOREVER, device=63)
    ended = await until("it is refused", controller.has_exited)
    assert ended.exit_kind == common_pb2.EXIT_KIND_NOT_STARTED
    assert "device" in ended.reason
    assert "63" in ended.reason
    controller.launch(FOREVER, job="job-2", spec={"strategy": "ring"})
    ended = await until("it is refused", lambda: controller.has_exited(job="job-2"))
    assert "spec.strategy" in ended.reason


async def test_nonsense_from_a_controller_changes_nothing(agent: RunningAgent, controller: ScriptedController) -> None:
    controller.launch(FOREVER)
    pid = await until("the worker runs", controller.is_running)
    controller.send(stop=agents_pb2.StopWorkers(job="../..", run=1))
    controller.send(stop=agents_pb2.StopWorkers(job="job-1", run=1, grace_s=float("nan")))
    controller.send(plan=agents_pb2.PlanForJob(job="job-1", plan=common_pb2.Plan(id=2, run=1, shares=[-1.0])))
    controller.send(launch=agents_pb2.Launch(id=common_pb2.WorkerId(job="a/b", run=1)))
    controller.send(forget=agents_pb2.Forget(id=common_pb2.WorkerId(job="job-1", run=1)))  # alive: not forgotten
    controller.send(log_ack=agents_pb2.LogAck(id=common_pb2.WorkerId(job="job-1", run=1), offset=2**62))
    controller.send()
    controller.launch("print('fine')", rank=1)
    await until("the messages after it are obeyed", lambda: controller.has_exited(rank=1))
    await until("output still comes", lambda: controller.printed(rank=1) == b"fine\n")
    assert controller.is_running() == pid
    assert len(controller.registers) == 1


async def test_rendezvous_port_is_free_for_rank_0_alone(agent: RunningAgent, controller: ScriptedController) -> None:
    port, offered = controller.ports[0], controller.ports
    bind = f"import socket, time\ns = socket.socket()\ns.bind(('127.0.0.1', {port}))\nprint('bound')\ntime.sleep(600)"
    controller.launch(bind)
    await until("rank 0 has it", lambda: controller.printed() == b"bound\n")
    await until("another is offered", lambda: port not in controller.ports and len(controller.ports) == 4)
    assert len(set(offered) & set(controller.ports)) == 3


async def test_agent_that_ends_leaves_nothing_and_tells_how_workers_ended(
    settings: AgentSettings, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_LAST_WORDS_S", 30.0)
    agent = RunningAgent(settings)
    await until("connected", lambda: controller.connected)
    controller.launch("import signal, sys, time\nsignal.signal(15, lambda *_: (print('last words'), sys.exit(0)))\n"
                      "print('ready')\ntime.sleep(600)")  # fmt: skip
    await until("ready", lambda: controller.printed().endswith(b"\n"))  # two writes: the word, the line's end
    pid = await until("that it runs is told", controller.is_running)
    await agent.end()
    assert not is_alive(pid)
    await until("its last words", lambda: controller.printed() == b"ready\nlast words\n")
    ended = await until("its end is told", controller.has_exited)
    assert (ended.exit_kind, ended.exit_code) == (common_pb2.EXIT_KIND_STOPPED, 0), (
        "it ended well, but had not finished"
    )
    assert not list((settings.state_dir / "pids").iterdir())
    assert not (settings.state_dir / "agent.sock").exists()


async def test_an_agent_is_scraped(settings: AgentSettings, controller: ScriptedController) -> None:
    if find_spec("prometheus_client") is None:
        pytest.skip("prometheus-client is not here: /metrics was NOT tested (make setup installs it)")
    address = f"127.0.0.1:{free_port()}"
    running = RunningAgent(replace(settings, metrics=address))
    try:
        await until("the agent is connected", lambda: controller.connected or running.task.done())
        found = b""
        async with asyncio.timeout(30):  # it hears later than the controller that it is
            while b"atoll_agent_connected 1.0\n" not in found:
                found = await asyncio.to_thread(
                    lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read()
                )
        assert b"atoll_agent_devices 1.0\n" in found
    finally:
        await running.end()
