"""The agent's stream: found, refused, lost, made again; and that no worker notices."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from agent_harness import RunningAgent, ScriptedController, until

from atoll.agent import controller_stream
from atoll.agent.supervisor.settings import AgentSettings
from atoll.agent.supervisor.worker_logs.output import BURST_BYTES, RATE_BYTES_PER_S
from atoll.errors import BadInput, Conflict, NotAllowed
from atoll.network.rpc import Tls
from atoll.v1 import common_pb2

FOREVER = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


async def test_controller_that_is_away_costs_no_worker(agent: RunningAgent, controller: ScriptedController) -> None:
    """1. A worker runs. 2. The controller ends. 3. The worker prints on. 4. Another controller begins on the address:
    the same process is reported, and the output goes on where it was acknowledged."""
    controller.launch("import time\nfor n in range(100000):\n    print(n)\n    time.sleep(0.05)")
    pid = await until("the worker runs", controller.is_running)
    await until("some output", lambda: controller.printed().count(b"\n") > 3)
    await controller.stop()
    had = controller.printed()
    controller.statuses = {}
    await asyncio.sleep(0.3)
    await controller.start()
    await until("the agent is back with its worker", lambda: controller.is_running() == pid)
    assert controller.registers[-1].workers[0].pid == pid
    assert len({register.session for register in controller.registers}) == 1
    await until("more output", lambda: controller.printed().count(b"\n") > had.count(b"\n") + 10)
    numbers = controller.printed().rpartition(b"\n")[0].split(b"\n")
    assert numbers == [str(n).encode() for n in range(len(numbers))]


async def test_output_that_was_not_acknowledged_is_sent_again(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    controller.acks = False
    controller.launch("import os\nos.write(1, b'once\\n')")
    await until("the output", lambda: controller.printed() == b"once\n")
    controller.output.clear()  # this controller kept nothing
    controller.acks = True
    await controller.stop()
    await controller.start()
    await until("the output, again", lambda: controller.printed() == b"once\n")


async def test_exit_while_the_controller_is_away_is_reported_later(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    controller.launch("import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)\nexit(7)")
    await until("the worker runs", controller.is_running)
    await controller.stop()
    folder = next((agent.settings.state_dir / "code").iterdir())
    (folder / "go").touch()
    pids = agent.settings.state_dir / "pids"  # where also a process that waits for a launch has its file
    await until("the worker ends", lambda: not list(pids.glob("job-1.*")))
    await controller.start()
    ended = await until("its end is told", controller.has_exited)
    assert ended.exit_code == 7


async def test_wrong_token_ends_the_agent(settings: AgentSettings, controller: ScriptedController) -> None:
    controller.token = "right"
    agent = RunningAgent(replace(settings, token="wrong"))
    with pytest.raises(NotAllowed, match="wrong join token"):
        await asyncio.wait_for(agent.task, 30)
    assert len(controller.registers) == 1


async def test_controller_with_another_token_costs_no_worker(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    """1. A worker runs. 2. The controller comes back with a token of its own, by mistake. 3. It is asked again and
    again, until it has the right one; the same process is there."""
    controller.launch(FOREVER)
    pid = await until("the worker runs", controller.is_running)
    await controller.stop()
    controller.statuses, controller.token, before = {}, "mistaken", len(controller.registers)
    await controller.start()
    await until("two refusals", lambda: len(controller.registers) >= before + 2)
    controller.token = agent.settings.token
    await until("the agent is back with its worker", lambda: controller.is_running() == pid)


async def test_missing_certificate_ends_the_agent(settings: AgentSettings, tmp_path: Path) -> None:
    tls = Tls(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    with pytest.raises(BadInput, match=r"cannot read .*ca\.pem"):
        await asyncio.wait_for(RunningAgent(replace(settings, tls=tls)).task, 30)


async def test_controller_that_wants_certificates_is_told_from_one_that_is_away(
    settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the connection and ends it: all that an agent without certificates sees of mutual TLS."""

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(end, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    agent = RunningAgent(replace(settings, controllers=(f"127.0.0.1:{port}",)))
    advice = "ends connections at once, as a controller with certificates does. Name yours with --tls-ca"
    await until("it says so", lambda: advice in caplog.text)
    await agent.end()
    server.close()
    await server.wait_closed()


async def test_certificate_of_another_role_ends_the_agent(
    settings: AgentSettings, controller: ScriptedController
) -> None:
    controller.refusal = (grpc.StatusCode.PERMISSION_DENIED, "this certificate is a client's")
    with pytest.raises(NotAllowed, match="a client's"):
        await asyncio.wait_for(RunningAgent(settings).task, 30)


async def test_controller_of_another_version_ends_the_agent(
    settings: AgentSettings, controller: ScriptedController
) -> None:
    controller.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "protocol = 1 must be 2")
    with pytest.raises(BadInput, match="protocol"):
        await asyncio.wait_for(RunningAgent(settings).task, 30)


async def test_name_of_a_predecessor_is_waited_for(settings: AgentSettings, controller: ScriptedController) -> None:
    controller.refusal = (grpc.StatusCode.ALREADY_EXISTS, "another agent named 'node-a' is connected")
    agent = RunningAgent(settings)
    await until("it was refused twice", lambda: len(controller.registers) >= 2)
    controller.refusal = None
    await until("it is let in", lambda: controller.connected)
    await agent.end()


async def test_name_that_stays_taken_ends_the_agent(
    settings: AgentSettings, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_stream, "TAKEN_S", 0.5)
    controller.refusal = (
        grpc.StatusCode.ALREADY_EXISTS,
        "another agent 'node-a' is there. Give this one another --name",
    )
    with pytest.raises(Conflict, match=r"'node-a'.*--name"):
        await asyncio.wait_for(RunningAgent(settings).task, 30)
    assert len(controller.registers) >= 2


async def test_standby_names_the_leader(settings: AgentSettings, controller: ScriptedController) -> None:
    leader = ScriptedController()
    await leader.start()
    controller.leader = leader.address  # which is not among the agent's controllers
    agent = RunningAgent(settings)
    await until("the agent is with the leader", lambda: leader.connected)
    assert len(controller.registers) == 1
    await agent.end()
    await leader.stop()


async def test_agent_goes_through_its_controllers_until_one_answers(
    settings: AgentSettings, controller: ScriptedController
) -> None:
    agent = RunningAgent(replace(settings, controllers=("127.0.0.1:1", "[::1]:2", controller.address)))
    await until("it is connected", lambda: controller.connected)
    await agent.end()


async def test_controller_that_promised_a_sign_of_life_and_stands_still_is_left(
    settings: AgentSettings, controller: ScriptedController
) -> None:
    """Its stream stays open, and takes all heartbeats. The workers notice nothing."""
    controller.pulse_s = 0.4
    agent = RunningAgent(settings)
    await until("the agent connected again", lambda: len(controller.registers) >= 2)
    assert len({register.session for register in controller.registers}) == 1
    await agent.end()


async def test_heartbeats_go_on_while_nothing_happens(agent: RunningAgent, controller: ScriptedController) -> None:
    before, began_s = controller.heartbeats, time.monotonic()
    await until("ten heartbeats", lambda: controller.heartbeats >= before + 10)
    assert time.monotonic() - began_s > 1.0, "every 0.2 s, as Registered says"


async def test_flood_of_output_delays_no_heartbeat_and_keeps_its_end(
    agent: RunningAgent, controller: ScriptedController
) -> None:
    """100 MB of garbage as fast as it can be printed, then a traceback."""
    controller.launch(
        "import os, sys, time\nblock = os.urandom(1 << 20)\nbegan = time.monotonic()\n"
        "for _ in range(100):\n    sys.stdout.buffer.write(block)\n"
        "print(f'took {time.monotonic() - began:.3f} s')\nraise ValueError('after the flood')"
    )
    before = controller.heartbeats
    began_s = asyncio.get_running_loop().time()
    ended = await until("the worker's end", controller.has_exited, 60)
    assert ended.exit_kind == common_pb2.EXIT_KIND_FAILED
    assert ended.reason == "ValueError: after the flood"
    await until("the output's end", lambda: controller.printed().endswith(b"ValueError: after the flood\n"), 50)
    took_s = asyncio.get_running_loop().time() - began_s
    assert controller.heartbeats - before >= took_s / 0.2 * 0.3
    assert b" MB of output dropped \xe2\x80\xa6\n" in controller.printed()
    assert 8e6 < len(controller.printed()) < BURST_BYTES + RATE_BYTES_PER_S * took_s + 1e6  # a slow flood keeps more
    assert sum(f.stat().st_size for f in (agent.settings.state_dir / "logs").rglob("run-*")) <= 21 * 1024 * 1024
