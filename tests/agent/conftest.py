from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from atoll.agent import daemon
from atoll.agent.supervisor.settings import AgentSettings
from atoll.agent.telemetry.devices import Device
from atoll.agent.telemetry.work import measured

sys.path.insert(0, str(Path(__file__).parent))  # for agent_harness

from agent_harness import RunningAgent, ScriptedController, children, until

MEASURED: dict[tuple[Device, ...], tuple[Device, ...]] = {}


async def measured_once(
    devices: Sequence[Device], threads: int | None, stop: asyncio.Event, files: Mapping[int, int]
) -> Sequence[Device]:
    """Measure the devices for the first agent alone: a process that calculates is most of what a short test costs."""
    found = MEASURED.get(tuple(devices)) or await measured(devices, threads, stop, files)
    if all(device.work_per_s for device in found):
        MEASURED[tuple(devices)] = found
    return found


@pytest.fixture(autouse=True)
def devices_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "measured", measured_once)


@pytest.fixture
async def controller() -> AsyncIterator[ScriptedController]:
    scripted = ScriptedController()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
def settings(controller: ScriptedController, tmp_path: Path) -> AgentSettings:
    return AgentSettings(controllers=(controller.address,), name="node-a", state_dir=tmp_path / "agent")


@pytest.fixture
async def agent(settings: AgentSettings, controller: ScriptedController) -> AsyncIterator[RunningAgent]:
    """Connected when the test begins, ended after it."""
    running = RunningAgent(settings)
    await until("the agent is connected", lambda: controller.connected or running.task.done())
    yield running
    await running.end()
    assert not children()
