"""Agents killed with SIGKILL, what they leave, and who cleans it up: what the kernel is needed for."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from agent_harness import RunningAgent, ScriptedController, is_alive, until

from atoll.agent.supervisor.processes.leftover_processes import PidFile, end_leftovers
from atoll.agent.supervisor.settings import AgentSettings
from atoll.errors import BadInput, Conflict
from atoll.v1 import agents_pb2, common_pb2

AGENT = """
import asyncio, pathlib, sys
from atoll.agent.daemon import serve
from atoll.agent.supervisor.settings import AgentSettings
assert "torch" not in sys.modules
settings = AgentSettings(controllers=(sys.argv[1],), name="node-a", state_dir=pathlib.Path(sys.argv[2]))
asyncio.run(serve(settings, asyncio.Event()))
"""
WITH_CHILDREN = (
    "import subprocess, sys, time\nfor away in (False, True):\n"
    "    command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
    "    print(subprocess.Popen(command, start_new_session=away).pid)\n"
    "time.sleep(600)"
)
GREETING = """
import os, sys, time, zmq
from atoll.v1 import common_pb2 as c, worker_pb2 as w
id = c.WorkerId(job=os.environ["ATOLL_JOB"], run=int(os.environ["ATOLL_RUN"]), rank=int(os.environ["RANK"]))
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.IDENTITY, f"{id.job}/{id.run}/{id.rank}".encode())
socket.connect(os.environ["ATOLL_AGENT_SOCKET"])
say = lambda **body: socket.send(w.WorkerMessage(id=id, **body).SerializeToString())
say(hello=w.Hello(pid=os.getpid(), secret=os.environ["ATOLL_WORKER_SECRET"]))
welcome = w.SupervisorMessage.FromString(socket.recv()).welcome
print(welcome.job_directory, welcome.speed, flush=True)
"""
OBEDIENT = (
    GREETING
    + """
for step in range(1, 10000):
    say(alive=w.Alive(step=step, plan=1))
    if socket.poll(50):
        message = w.SupervisorMessage.FromString(socket.recv())
        if message.HasField("stop"):
            from atoll.v1.agents_pb2 import WorkerTelemetry
            say(telemetry=WorkerTelemetry(id=id, checkpoint_step=step))
            socket.close()
            sys.exit(85)
        print("plan", message.plan.id, flush=True)
"""
)


async def test_killed_agent_takes_its_workers_along_and_its_successor_the_rest(
    controller: ScriptedController, tmp_path: Path
) -> None:
    """1. A worker with a child of its own runs, and a process waits to be one. 2. Its agent is killed. 3. The kernel
    kills both; the worker's children live. 4. The next agent on that state directory ends them before it registers."""
    command = [sys.executable, "-c", AGENT, controller.address, str(tmp_path / "agent")]
    agent = subprocess.Popen(command, start_new_session=True)  # noqa: ASYNC220
    pids = tmp_path / "agent" / "pids"
    waits = await until(
        "one waits", lambda: [facts[0] for path in pids.glob("spare-*") if (facts := PidFile(path).read())], 60
    )
    controller.launch(WITH_CHILDREN, spec={"env": {"PYTHONHASHSEED": "0"}})  # which none can wait for
    await until("its children's pids", lambda: controller.printed().count(b"\n") == 2)
    pid = await until("that it runs is told", controller.is_running)
    near, far = children = [int(line) for line in controller.printed().split()]
    agent.kill()
    agent.wait(30)
    await until("both are dead", lambda: not any(map(is_alive, [pid, *waits])), 30)
    assert all(map(is_alive, children))
    registered = len(controller.registers)
    successor = RunningAgent(AgentSettings(controllers=(controller.address,), state_dir=tmp_path / "agent"))
    await until("the successor is there", lambda: len(controller.registers) > registered)
    assert not is_alive(near)
    await until("what left its group has ended", lambda: not is_alive(far))  # it is killed, and not waited for
    assert not controller.registers[-1].workers
    await successor.end()


def test_reused_pid_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        PidFile(tmp_path / "job-1.1.0.pid").write(other.pid, "-")
        pid, ticks, boot, _ = (tmp_path / "job-1.1.0.pid").read_text().split()
        (tmp_path / "job-1.1.0.pid").write_text(f"{pid} {int(ticks) - 5} {boot} -\n")
        (tmp_path / "job-1.1.1.pid").write_text(f"{pid} {ticks} another-boot -\n")
        (tmp_path / "job-1.1.2.pid").write_text(f"{pid}")
        assert end_leftovers(tmp_path) == 0
        assert other.poll() is None
        assert list(tmp_path.iterdir()) == []
        PidFile(tmp_path / "job-1.1.0.pid").write(other.pid, "-")
        assert end_leftovers(tmp_path) == 1
        assert other.wait(30) == -signal.SIGKILL
    finally:
        other.kill()
        other.wait(30)


async def test_second_agent_on_one_state_directory_is_refused(agent: RunningAgent, settings: AgentSettings) -> None:
    with pytest.raises(Conflict, match="--state-dir"):
        await RunningAgent(replace(settings, name="node-b")).task


async def test_state_directory_that_cannot_be_made_is_told(settings: AgentSettings) -> None:
    with pytest.raises(BadInput, match=r"/proc/none.*--state-dir"):
        await RunningAgent(replace(settings, state_dir=Path("/proc/none"))).task


async def test_worker_that_says_hello_gets_plans_and_stops_by_word(
    settings: AgentSettings, controller: ScriptedController
) -> None:
    agent = RunningAgent(replace(settings, speed=0.4))
    await until("connected", lambda: controller.connected)
    controller.launch(OBEDIENT)
    status = await until("it uses atoll", lambda: (s := controller.status()) and s.uses_atoll and s.step > 2 and s)
    assert (status.plan, status.state) == (1, common_pb2.WORKER_STATE_RUNNING)
    plan = common_pb2.Plan(id=2, run=1, shares=[1.0], from_step=5)
    controller.send(plan=agents_pb2.PlanForJob(job="job-1", plan=plan))
    await until("the plan is there", lambda: b"plan 2" in controller.printed())
    controller.send(stop=agents_pb2.StopWorkers(job="job-1", run=1, grace_s=60, reason="to grow"))
    ended = await until("it ends by itself", controller.has_exited)
    assert (ended.exit_kind, ended.exit_code) == (common_pb2.EXIT_KIND_DRAINED, 85)
    await until("its last telemetry", lambda: any(t.checkpoint_step > 2 for t in controller.telemetry))
    assert controller.printed().startswith(f"{agent.settings.jobs / 'job-1'} 0.4".encode())
    await agent.end()


async def test_worker_that_falls_silent_counts_as_dead(agent: RunningAgent, controller: ScriptedController) -> None:
    controller.launch(GREETING + "time.sleep(600)", spec={"stall_timeout_s": 0.6})
    ended = await until("it is ended", controller.has_exited)
    assert ended.exit_kind == common_pb2.EXIT_KIND_UNRESPONSIVE
    assert "no sign of life" in ended.reason


async def test_own_checkpoint_directory_is_used(
    agent: RunningAgent, controller: ScriptedController, tmp_path: Path
) -> None:
    chosen = tmp_path / "shared"
    controller.launch(GREETING, spec={"checkpoint": common_pb2.CheckpointPolicy(directory=str(chosen))})
    await until("its output", lambda: controller.printed().startswith(f"{chosen / 'job-1'} 1.0".encode()))
    controller.launch("", job="job-2", spec={"checkpoint": common_pb2.CheckpointPolicy(directory="/proc/none")})
    ended = await until("it is refused", lambda: controller.has_exited(job="job-2"))
    assert ended.exit_kind == common_pb2.EXIT_KIND_NOT_STARTED
    assert "/proc/none" in ended.reason
