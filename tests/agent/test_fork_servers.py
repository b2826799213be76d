"""Processes that wait for their launch: which launch gets one, and what becomes of those that none gets."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_harness import RunningAgent, ScriptedController, children, is_alive
from agent_harness import until as until_by
from test_processes import OBEDIENT

from atoll.agent.supervisor import fork_servers
from atoll.agent.supervisor.fork_servers import NO_HELLO_S, QUIET_BEFORE_IMPORT_S, DeviceForkServer, backoff_s, is_due
from atoll.agent.supervisor.machine import Phase, Worker
from atoll.agent.supervisor.processes import fork_server
from atoll.agent.supervisor.processes.environment import Interpreter, can_wait
from atoll.agent.supervisor.processes.fork_server import ForkServer
from atoll.agent.supervisor.processes.leftover_processes import PidFile
from atoll.agent.supervisor.progress import Life, Progress
from atoll.agent.supervisor.settings import AgentSettings
from atoll.jobs.worker_key import WorkerKey
from atoll.v1 import common_pb2
from atoll.v1.agents_pb2 import StopWorkers

until = partial(until_by, deadline_s=60)  # each process that is started here waits for a processor
KEY = WorkerKey("job-1", 1, 0)
MADE = Interpreter(("python",), {"HOME": "/root"}, "")


def test_a_process_waits_for_equals_alone() -> None:
    assert Interpreter(("python",), {"HOME": "/root"}, "") == MADE
    for other in (
        replace(MADE, command=("on_numa_node", "python")),
        replace(MADE, env={"HOME": "/root", "OMP_NUM_THREADS": "2"}),
        replace(MADE, job="job-1"),
    ):
        assert other != MADE
    assert can_wait({"HOME": "/root", "PYTHONPATH": "/a:/b", "LD_LIBRARY_PATH": "/c"}, {"LR": "0.1"})
    assert not can_wait({}, {"PYTHONHASHSEED": "1"})
    assert not can_wait({}, {"LD_PRELOAD": "/lib/jemalloc.so"})
    assert not can_wait({"PYTHONPATH": "/a:lib"}, {})
    assert not can_wait({"PYTHONPATH": "/a:"}, {}), "an empty one is the working folder"


def test_the_next_one_is_made_when_the_worker_trains() -> None:
    """1. Not before it is due, nor while a worker goes to its first step, however long. 2. A while after it has
    trained, or is gone. 3. One that tells of no steps is given a minute. 4. What ends by itself is made again later and
    later."""
    fetching = Worker(KEY, Phase.FETCHING)
    greeted = Worker(KEY, Phase.RUNNING, life=Life(heard_at_s=101.0), progress=Progress(step=7, since_s=101.0))
    trains = replace(greeted, progress=greeted.progress.at(8, 102.0))
    for after in (trains, replace(greeted, phase=Phase.EXITED), None):
        slot = DeviceForkServer(MADE, due_s=100.0, user=KEY)
        assert not is_due(slot, {KEY: fetching}, 101.0)
        assert not is_due(slot, {KEY: greeted}, 1e6)
        workers = {KEY: after} if after is not None else {}
        assert not is_due(slot, workers, 102.0)
        assert not is_due(slot, workers, 101.9 + QUIET_BEFORE_IMPORT_S)
        assert is_due(slot, workers, 102.0 + QUIET_BEFORE_IMPORT_S)
    slot = DeviceForkServer(MADE, due_s=100.0, user=KEY)
    assert not is_due(slot, {KEY: fetching}, 99.9 + NO_HELLO_S)
    assert is_due(slot, {KEY: fetching}, 100.0 + NO_HELLO_S)
    assert not is_due(DeviceForkServer(MADE, due_s=100.0), {}, 99.0)
    assert [backoff_s(count) for count in (1, 2, 3, 100)] == [1.0, 2.0, 4.0, 600.0]


def waits(settings: AgentSettings) -> int:
    """The pid of the server of device 0, or 0."""
    found = (PidFile(path).read() for path in (settings.state_dir / "pids").glob("spare-0-*.pid"))
    return next((facts[0] for facts in found if facts is not None and is_alive(facts[0])), 0)


def variables(pid: int) -> dict[str, str]:
    """Of a process, once it is executed; none of one that has just ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).environ() if pid else {}
    return {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ForkServer]:
    """Servers, as they are made: they have imported nothing, so they are ready soon. tests/runtime/test_warm_start.py
    has what they import. None is while `tmp_path / "busy"` is there."""
    program, made = tmp_path / "waits.py", []
    program.write_text(
        "import os, time\nfrom atoll.agent.runtime.api import warm_start\n"
        f"def imports():\n    while os.path.exists({str(tmp_path / 'busy')!r}):\n        time.sleep(0.01)\n"
        "warm_start._import = imports\nwarm_start.main()"
    )
    monkeypatch.setattr(fork_server, "PROGRAM", str(program))
    monkeypatch.setattr(fork_server, "FORK_S", 30.0)  # whoever takes longer is ended, and the launch is none of its
    for constant, value in (
        ("QUIET_BEFORE_IMPORT_S", 0.0),
        ("_LOOK_S", 0.1),
        ("_BACKOFF_S", (0.1, 0.1)),
    ):
        monkeypatch.setattr(fork_servers, constant, value)

    class Recorded(ForkServer):
        def __init__(self, *arguments: Any, **fields: Any) -> None:
            super().__init__(*arguments, **fields)
            made.append(self)

    monkeypatch.setattr(fork_servers, "ForkServer", Recorded)
    return made


async def trains(controller: ScriptedController, run: int) -> None:
    await until("it trains", lambda: (status := controller.status(run=run)) and status.step > 2)


async def printed(controller: ScriptedController, job: str, run: int) -> bytes:
    await until("it has ended", lambda: controller.has_exited(job=job, run=run))
    return await line(controller, job, run)


async def line(controller: ScriptedController, job: str, run: int) -> bytes:
    """What one `print` writes may come in pieces, and may come later than the status that tells of its end."""

    def whole() -> bytes:
        text = controller.printed(job=job, run=run)
        return text if b"\n" in text else b""

    return await until("its output", whole)


async def test_launches_are_forked_from_what_waits_for_them(
    settings: AgentSettings, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch, quick: list[ForkServer]
) -> None:
    """1. A server waits before any job is there. 2. Killed while it waits, it is made again; nobody is told of a
    worker. 3. A job without variables has a fork of it, a child of the agent, with its place, its folder and its
    output. 4. The worker is killed: the next one is forked at once, by the same server. 5. The server is killed: the
    worker lives, is stopped by word, and another one is made. 6. A job with a secret starts beside it, and what waits
    after that is for this job: its next two runs are forked from it, another job is not. 7. It is over when the job's
    workers are long gone. 8. The agent ends what waits."""
    agent = RunningAgent(settings)
    first = await until("a server", lambda: waits(settings))
    os.kill(first, signal.SIGKILL)
    pid = await until("another one", lambda: (pid := waits(settings)) != first and pid)
    await until("it is ready", lambda: quick[-1].process.pid == pid and quick[-1].ready)
    assert not controller.statuses

    script = "import os\nprint(os.getpid(), os.getsid(0), os.getppid(), os.environ['RANK'])\n" + OBEDIENT
    for run in (1, 2):
        controller.launch(script, run=run)
        await trains(controller, run)
        worker = controller.is_running(run=run)
        assert (await line(controller, "job-1", run)).startswith(b"%d %d %d 0\n" % (worker, worker, os.getpid()))
        assert waits(settings) == pid != worker
        if run == 1:
            os.kill(worker, signal.SIGKILL)
            ended = await until("its end is told", lambda: controller.has_exited(run=1))
            assert (ended.exit_kind, ended.exit_code) == (common_pb2.EXIT_KIND_SIGNALLED, -signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    second = await until("another server", lambda: (new := waits(settings)) not in (0, pid) and new)
    assert controller.is_running(run=2) == worker
    controller.send(stop=StopWorkers(job="job-1", run=2, grace_s=20))
    ended = await until("it has stopped", lambda: controller.has_exited(run=2))
    assert ended.exit_kind == common_pb2.EXIT_KIND_DRAINED

    secret = {"spec": {"secrets": {"KEY": "of-job-2"}}}
    controller.launch(OBEDIENT, job="job-2", **secret)
    await until("it trains", lambda: (s := controller.status(job="job-2")) and s.step > 2)
    third = await until("one waits for job-2", lambda: (pid := waits(settings)) not in (0, second) and pid)
    await until("it is ready", lambda: quick[-1].process.pid == third and quick[-1].ready)
    for run in (2, 3):
        controller.launch("import os\nprint(os.getppid(), os.environ['KEY'])", job="job-2", run=run, **secret)
        assert await printed(controller, "job-2", run) == b"%d of-job-2\n" % os.getpid()
        assert waits(settings) == third
    controller.launch("print('x')", job="job-3")
    await until("job-3 has ended", lambda: controller.has_exited(job="job-3"))
    await until("what waits is job-3's", lambda: (pid := waits(settings)) not in (0, third) and pid)
    controller.launch("print('x')", job="job-2", run=4, **secret)
    await until("run 4 has ended", lambda: controller.has_exited(job="job-2", run=4))
    await until("one waits for job-2", lambda: "KEY" in variables(waits(settings)))
    monkeypatch.setattr(fork_servers, "KEEP_JOB_VARIABLES_S", 0.0)
    await until("nothing waits with its secret", lambda: "KEY" not in (variables(waits(settings)) or {"KEY"}))
    await agent.end()
    assert not children()


async def test_a_launch_does_not_wait_for_imports(
    settings: AgentSettings, controller: ScriptedController, tmp_path: Path, quick: list[ForkServer]
) -> None:
    """1. A server still imports. 2. A launch comes: the worker starts without it, and the server is ended. 3. Once the
    worker trains, the next one waits."""
    (tmp_path / "busy").touch()
    agent = RunningAgent(settings)
    pid = await until("a server", lambda: waits(settings))
    controller.launch(OBEDIENT)
    worker = await until("it is launched", controller.is_running)
    assert worker != pid
    await until("the server is gone", lambda: not is_alive(pid))
    (tmp_path / "busy").unlink()
    await until("it trains", lambda: (status := controller.status()) and status.step > 2)
    await until("the next one waits", lambda: waits(settings) not in (0, pid) and quick[-1].ready)
    assert controller.is_running() == worker
    await agent.end()
    assert not children()


@pytest.mark.usefixtures("quick")
async def test_small_machines_keep_none(
    settings: AgentSettings,
    controller: ScriptedController,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. One waits. 2. Memory runs low: it is ended, none is made, a worker starts without. 3. Nothing is logged."""
    caplog.set_level(logging.INFO)
    agent = RunningAgent(settings)
    pid = await until("a process waits", lambda: waits(settings))
    monkeypatch.setattr(fork_servers, "available_bytes", lambda: fork_servers.FORK_SERVER_BYTES)
    await until("it is gone", lambda: not is_alive(pid))
    controller.launch("print('x')")
    ended = await until("a worker has ended", controller.has_exited)
    assert ended.exit_kind == common_pb2.EXIT_KIND_FINISHED
    assert not waits(settings)
    assert not [record for record in caplog.records if "wait" in record.message]
    await agent.end()
