"""Processes that wait for their launch: which launch gets one, and what becomes of those that none gets."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from agent_harness import RunningAgent, ScriptedController, is_alive
from agent_harness import until as until_by
from test_processes import OBEDIENT

from atoll.agent.settings import AgentSettings
from atoll.agent.supervisor import spares
from atoll.agent.supervisor.interpreter import Interpreter, can_wait
from atoll.agent.supervisor.leftovers import PidFile
from atoll.agent.supervisor.liveness import Life
from atoll.agent.supervisor.machine import Phase, Worker
from atoll.agent.supervisor.progress import Progress
from atoll.agent.supervisor.spares import PLAIN_S, REST_S, DeviceSpare, backoff_s, is_due
from atoll.v1 import common_pb2
from atoll.worker_key import WorkerKey

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
        slot = DeviceSpare(MADE, due_s=100.0, user=KEY)
        assert not is_due(slot, {KEY: fetching}, 101.0)
        assert not is_due(slot, {KEY: greeted}, 1e6)
        workers = {KEY: after} if after is not None else {}
        assert not is_due(slot, workers, 102.0)
        assert not is_due(slot, workers, 101.9 + REST_S)
        assert is_due(slot, workers, 102.0 + REST_S)
    slot = DeviceSpare(MADE, due_s=100.0, user=KEY)
    assert not is_due(slot, {KEY: fetching}, 99.9 + PLAIN_S)
    assert is_due(slot, {KEY: fetching}, 100.0 + PLAIN_S)
    assert not is_due(DeviceSpare(MADE, due_s=100.0), {}, 99.0)
    assert [backoff_s(count) for count in (1, 2, 3, 100)] == [1.0, 2.0, 4.0, 600.0]


def waits(settings: AgentSettings) -> int:
    """The pid of what waits on device 0, or 0."""
    found = (PidFile(path).read() for path in (settings.state_dir / "pids").glob("spare-0-*.pid"))
    return next((facts[0] for facts in found if facts is not None and is_alive(facts[0])), 0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What waits has imported nothing, so it is there at once. tests/runtime/test_warm_start.py has what it imports."""
    program = tmp_path / "waits.py"
    program.write_text(
        "from atoll.agent.runtime import warm_start\nwarm_start._import = lambda: None\nwarm_start.main()"
    )
    monkeypatch.setattr(spares, "PROGRAM", str(program))
    for constant, value in (("REST_S", 0.0), ("POLITE_S", 0.0), ("_LOOK_S", 0.1), ("_BACKOFF_S", (0.1, 0.1))):
        monkeypatch.setattr(spares, constant, value)


@pytest.mark.usefixtures("quick")
async def test_launches_get_what_waits_for_them(
    settings: AgentSettings, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A process waits before any job is there. 2. Killed while it waits, it is made again; nobody is told of a
    worker. 3. A job without variables gets it: that process is the worker, with its place, its folder and its output;
    it is stopped by word. 4. Once it has trained, the next one waits. 5. A job with a secret starts beside it, and
    what waits after that is for this job: the next run of it gets it, another job does not. 6. It is over when the
    job's workers are long gone. 7. The agent ends what waits."""
    agent = RunningAgent(settings)
    first = await until("a process waits", lambda: waits(settings))
    os.kill(first, signal.SIGKILL)
    pid = await until("another one waits", lambda: (pid := waits(settings)) != first and pid)
    assert not controller.statuses

    controller.launch("import os\nprint(os.getpid(), os.getsid(0), os.environ['RANK'])\n" + OBEDIENT)
    await until("it trains", lambda: (status := controller.status()) and status.step > 2)
    assert controller.printed().startswith(b"%d %d 0\n" % (pid, pid))
    assert controller.is_running() == pid
    assert psutil.Process(pid).ppid() == os.getpid()
    second = await until("the next one waits", lambda: waits(settings))

    secret = {"spec": {"secrets": {"KEY": "of-job-2"}}}
    controller.launch(OBEDIENT, job="job-2", **secret)
    assert await until("it runs", lambda: controller.is_running(job="job-2")) != second
    third = await until("one waits for job-2", lambda: (pid := waits(settings)) not in (0, second) and pid)
    await until("with its secret", lambda: psutil.Process(third).environ().get("KEY") == "of-job-2")  # once executed
    controller.launch("print('x')", job="job-3")
    await until("job-3 has ended", lambda: controller.has_exited(job="job-3"))
    await until("what waits is job-3's", lambda: (pid := waits(settings)) not in (0, third) and pid)
    controller.launch(OBEDIENT, job="job-2", run=2, **secret)
    await until("job-2 trains", lambda: (s := controller.status(job="job-2", run=2)) and s.step > 2)
    fourth = await until("one waits for job-2", lambda: waits(settings))
    controller.launch("import os\nprint(os.getpid(), os.environ['KEY'])", job="job-2", run=3, **secret)
    await until("run 3 has ended", lambda: controller.has_exited(job="job-2", run=3))
    await until("its output", lambda: controller.printed(job="job-2", run=3) == b"%d of-job-2\n" % fourth)
    monkeypatch.setattr(spares, "KEPT_S", 0.0)
    await until(
        "nothing waits with its secret",
        lambda: (pid := waits(settings)) and "KEY" not in (psutil.Process(pid).environ() or {"KEY"}),
    )
    await agent.end()
    assert not psutil.Process().children(recursive=True)


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
    monkeypatch.setattr(spares, "available_bytes", lambda: spares.SPARE_BYTES)
    await until("it is gone", lambda: not is_alive(pid))
    controller.launch("print('x')")
    ended = await until("a worker has ended", controller.has_exited)
    assert ended.exit_kind == common_pb2.EXIT_KIND_FINISHED
    assert not waits(settings)
    assert not [record for record in caplog.records if "wait" in record.message]
    await agent.end()
