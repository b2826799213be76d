"""Runs of strategy groups: an agent, with the real scheduler behind it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from zmq_agent import FakeAgent, Start

from atoll.strategies.declaration import as_json, read
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.scheduler import GroupScheduler
from atoll.strategies.groups.settings import Groups
from atoll.v1.common_pb2 import StrategyMessage
from atoll.v1.worker_pb2 import SupervisorMessage


class Scheduling:
    """The scheduler behind an agent, with a thread for what becomes due, as a controller has one. Can be taken away."""

    def __init__(self, agent: FakeAgent, settings: Groups) -> None:
        self._agent, self._settings = agent, settings
        self._scheduler = GroupScheduler(settings)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._away = False
        self.lost: set[tuple[int, int]] = set()  # (rank, signal): this answer does not arrive
        self.groups: list[GroupsMessage] = []
        agent.answers = self._answers
        self._thread = threading.Thread(target=self._run, name="scheduling")

    def __enter__(self) -> Scheduling:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def leave(self) -> int:
        """From now on nothing is answered. Returns how many members of groups were told."""
        with self._lock:
            self._away = True
            return len(self.groups)

    def another(self) -> None:
        """Another controller leads, which knows nothing."""
        with self._lock:
            self._scheduler = GroupScheduler(self._settings)
            self._away = False

    def _answers(self, rank: int, body: str) -> list[tuple[int, str]]:
        with self._lock:
            if self._away:
                return []
            message = read(GroupsMessage, body, "message")
            return self._told(self._scheduler.heard(rank, message, time.monotonic()))

    def _run(self) -> None:
        while not self._closing.wait(0.002):
            with self._lock:
                if self._away:
                    continue
                due_s = self._scheduler.due_s
                now_s = time.monotonic()
                told = self._told(self._scheduler.passed(now_s)) if due_s is not None and due_s <= now_s else []
            for rank, body in told:
                self._agent.send(rank, SupervisorMessage(strategy=StrategyMessage(body=body)))

    def _told(self, answers: Any) -> list[tuple[int, str]]:
        told = []
        for rank, answer in answers:
            if answer.group:
                self.groups.append(answer)
            if (rank, answer.signal) not in self.lost:
                told.append((rank, as_json(answer.said())))
        return told


def groups(out: Path, world_size: int, *, start: Start, run: int = 1, **settings: Any) -> FakeAgent:
    """An agent whose job is one of strategy groups."""
    agent = FakeAgent(out, run=run, world_size=world_size, start=start)
    agent.spec.strategy, agent.spec.strategy_settings = "groups", as_json(settings)
    agent.place([f"n{rank}" for rank in range(world_size)], [f"i{rank % 2}" for rank in range(world_size)])
    return agent


def rounds(out: Path, rank: int, run: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"run-{run}-rank-{rank}.jsonl").read_text().splitlines()]


def ended_alike(out: Path, ranks: Iterable[int], run: int = 1) -> dict[str, Any]:
    """The state that these ended with, which is the same on all, bit for bit."""
    states = [torch.load(out / f"run-{run}-rank-{rank}.end", weights_only=True) for rank in ranks]
    for state in states[1:]:
        for name, one in states[0]["model"].items():
            assert torch.equal(one, state["model"][name]) or not one.is_floating_point(), name
        for number, kept in states[0]["optimizer"]["state"].items():
            for name, one in kept.items():
                assert torch.equal(one, state["optimizer"]["state"][number][name]), (number, name)
    return dict(states[0])
