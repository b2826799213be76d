"""What `atoll.init` found out: who this worker is, with whom it trains, and what it was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.agent.runtime.exits import say
from atoll.agent.runtime.group import Group
from atoll.agent.runtime.link import Link
from atoll.agent.runtime.place import Place
from atoll.agent.runtime.probe import Probe
from atoll.agent.runtime.strategy import Strategy
from atoll.agent.runtime.terms import Terms
from atoll.agent.runtime.throttle import Throttle
from atoll.v1.common_pb2 import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where checkpoints go and when."""

    directory: Path | None  # None: none are written
    every_steps: int  # 0: only at the end and in emergencies
    keep: int  # complete ones that stay


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Where checkpoints go that stay in memory."""

    folder: Path | None  # of this job and this machine's agent; None where that has no room for any
    room_bytes: int  # for this rank's, as the agent found it
    nodes: tuple[str, ...]  # by rank; empty where they are not known
    kept_by: tuple[tuple[int, ...], ...]  # by rank, the nodes that hold copies, as positions in the order of nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One worker's membership in its run. `group` is None in a run of one, `link` where there is no agent."""

    place: Place
    device: torch.device
    job: str
    run: int
    seed: int
    strategy: Strategy
    checkpoint: CheckpointSettings
    first: Terms | None  # of the plan it was launched with, whose id is 1
    group: Group | None
    collective_timeout_s: float
    link: Link | None
    throttle: Throttle
    memory: MemorySettings | None = None
    probe: Probe | None = None  # of `atoll profile`, which then says what is trained

    def notice(self, level: Level.ValueType, text: str) -> None:
        """Tell people: in this worker's output, and through the agent in the job's events."""
        say(text)
        if self.link is not None:
            self.link.outbox.notice(level, text)
