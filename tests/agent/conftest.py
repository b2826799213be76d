from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.agent.settings import AgentSettings

sys.path.insert(0, str(Path(__file__).parent))  # for agent_harness

from agent_harness import RunningAgent, ScriptedController, children, until


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
