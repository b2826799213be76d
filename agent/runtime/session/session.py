"""Session of a worker, made by `atoll.init`: its rank, its peers, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from atoll.agent.runtime.agent_link.exits import say
from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.runtime.plans.planned_step import PlannedStep
from atoll.agent.runtime.session.probe import Probe
from atoll.agent.runtime.session.throttle import Throttle
from atoll.agent.runtime.transport.process_groups import Group
from atoll.agent.runtime.transport.relayed_links import RelayedLinks
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings
from atoll.v1.agents_pb2 import DataKeys, Helping, Member, ShardHolder
from atoll.v1.common_pb2 import Level
from atoll.v1.worker_pb2 import Welcome

VIEW_BITS: Final = 40
"""Bits of an incarnation below the view's, of 64: a job has fewer runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheckpoint:
    """The checkpoint of another job that this one begins with."""

    directory: Path | None  # where it would lie on this machine
    store: str  # URL; empty: in none
    step: int | None  # None: the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Places and times of checkpoints."""

    directory: Path | None  # None: none are written
    every_steps: int  # 0: only at the end and in emergencies
    keep: int  # complete ones that stay
    keep_every_steps: int = 0  # the first at or after each multiple stays for good; 0: none
    store: str = ""  # URL of the object store that is kept level with the directory; empty: none
    start_from: SourceCheckpoint | None = None  # where the job has none of its own yet


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Places of checkpoints that stay in memory."""

    folder: Path | None  # of this job and this machine's agent; None where that has no room for any
    room_bytes: int  # for this rank's, as the agent found it
    nodes: tuple[str, ...]  # by rank; empty where they are not known
    kept_by: tuple[tuple[int, ...], ...]  # by rank, the nodes that hold copies, as positions in the order of nodes
    disk_folder: Path | None = None  # for what has no room in memory; None: it has no place
    disk_room_bytes: int = 0
    outside: tuple[ShardHolder, ...] = ()  # agents of other machines that hold shards of the job

    @property
    def folders(self) -> ShardFolders:
        return ShardFolders(self.folder, self.disk_folder)


@dataclass(slots=True, kw_only=True)
class Session:
    """One worker's membership in its run. `group` is None in a run of one, `link` without an agent.

    The training thread replaces the fields of a view with it: `view`, `place`, `members`, `keys`, `group`,
    `links` and `memory`; and `strategy` where the view has another."""

    place: WorkerPlace
    device: torch.device
    job: str
    run: int
    seed: int
    strategy: StrategySettings
    checkpoint: CheckpointSettings
    first: PlannedStep | None  # of the plan it was launched with, whose id is 1
    group: Group | None
    collective_timeout_s: float
    link: AgentLink | None
    throttle: Throttle
    memory: MemorySettings | None = None
    probe: Probe | None = None  # of `atoll profile`, which then says what is trained
    view: int = 1  # which membership of the run this is; 0: it joins, and is in none yet
    members: tuple[Member, ...] = ()  # by rank in it, where the controller said so
    keys: DataKeys | None = None  # likewise
    links: RelayedLinks | None = None  # of the view; None where nobody says how others are reached
    helping: Helping | None = None  # of a volunteer, which is no rank: whom it helps
    strategy_is_automatic: bool = False  # the controller chose it, not the job's user
    plans_of_another: bool = False  # plans of the view have parameters of a strategy that the script does not allow
    refusal: str = ""  # why the script does not allow the strategy of the view

    @property
    def incarnation(self) -> int:
        """The run, and in its upper bits the view where that is not the first: what is of another one is refused."""
        return self.run | max(self.view - 1, 0) << VIEW_BITS

    @property
    def in_force(self) -> bool:
        """True if the view is in force, as far as this worker was told: only then its checkpoints count."""
        return self.view == 1 or (self.link is not None and 0 < self.view <= self.link.in_force)

    @property
    def joins(self) -> bool:
        """True if this worker is still to be admitted to a view."""
        return self.view == 0

    def fall_back(self, strategy: StrategySettings, why: str) -> None:
        """Train by another strategy than the view's, whose plans count without their strategy's parameters."""
        self.strategy, self.plans_of_another, self.refusal = strategy, True, why
        if self.first is not None:
            self.first = replace(self.first, params=registry.of(strategy).plan_parameters())

    def notice(self, level: Level.ValueType, text: str) -> None:
        """Notify the user: in this worker's output, and through the agent in the job's events."""
        say(text)
        if self.link is not None:
            self.link.outbox.notice(level, text)


def checkpoint_settings(welcome: Welcome) -> CheckpointSettings:
    """Resolve the submitted job's checkpoint policy to folders of this machine."""
    policy, job = welcome.launch.spec.checkpoint, welcome.launch.id.job
    start = policy.start_from if policy.HasField("start_from") else None
    return CheckpointSettings(
        directory=Path(welcome.job_directory) if welcome.job_directory else None,
        every_steps=policy.every_steps,
        keep=max(policy.keep, 1),
        keep_every_steps=policy.keep_every_steps,
        store=_in_store(policy.directory, job),
        start_from=None
        if start is None
        else SourceCheckpoint(
            directory=Path(welcome.start_directory) if welcome.start_directory else None,
            store=_in_store(start.directory, start.job),
            step=start.step if start.HasField("step") else None,
        ),
    )


def _in_store(directory: str, job: str) -> str:
    """Return the URL of the job's checkpoints, empty if the directory is not a URL."""
    return "/".join([directory.rstrip("/"), *([job] if job else [])]) if "://" in directory else ""


def memory_settings(welcome: Welcome, members: Sequence[Member]) -> MemorySettings | None:
    """Return the settings of checkpoints in memory, on every rank alike; None if the job has none. members: by rank."""
    launch = welcome.launch
    if not launch.spec.checkpoint.memory_replicas:
        return None
    return MemorySettings(
        folder=Path(welcome.memory_directory) if welcome.memory_directory else None,
        room_bytes=welcome.memory_bytes,
        nodes=tuple(member.node for member in members),
        kept_by=tuple(tuple(member.holders) for member in members),
        disk_folder=Path(welcome.spill_directory) if welcome.spill_directory else None,
        disk_room_bytes=welcome.spill_bytes,
        outside=tuple(launch.outside),
    )
