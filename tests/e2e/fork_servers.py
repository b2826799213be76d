"""Processes that wait for launches (docs/operations.md) on the agents of a cluster of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import psutil
from cluster import wait_until

from atoll.agent.supervisor.processes.leftover_processes import PidFile

CALM_S: Final = 1.0
"""A process that slept, and took no processor, for so long has imported all. One that waits for a processor sleeps
not."""


def wait_for_fork_servers(folder: Path, agents: int) -> None:
    """Until what waits on each of agent-0, agent-1, ... has nothing more to do. folder: of their state."""
    used: dict[int, tuple[float, float]] = {}

    def calm() -> bool:
        now_s, found = time.monotonic(), []
        for number in range(agents):
            pids = (folder / f"agent-{number}" / "pids").glob("spare-*.pid")
            facts = next((facts for path in pids if (facts := PidFile(path).read())), None)
            if facts is None:
                return False
            process = psutil.Process(facts[0])
            cpu_s, sleeps = sum(process.cpu_times()[:2]), process.status() == psutil.STATUS_SLEEPING
            if not sleeps or used.get(facts[0], (-1.0, 0.0))[0] != cpu_s:
                used[facts[0]] = (cpu_s, now_s)
            found.append(cpu_s > CALM_S and now_s - used[facts[0]][1] > CALM_S)
        return all(found)

    wait_until("a process waits on each agent", calm, 120)
