"""The links and islands of a leader epoch: what agents are asked, and what follows from their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from made import node

from atoll.controller.jobs.agents.sessions import AgentSession, AgentSessions
from atoll.controller.jobs.links.board import FIRST_MEASUREMENTS_S, LinkBoard
from atoll.controller.jobs.model.observed import ObservedWorker, WorkerPhase
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import NodeRecord
from atoll.jobs.worker_key import WorkerKey
from atoll.relay.handshake import node_key
from atoll.v1 import agents_pb2

FAST, THIN = 900e6, 20e6


class World:
    """A board with agents that answer what they are asked by `link`, at once. clock: stands still unless moved."""

    def __init__(self, link: Callable[[str, str], float] = lambda a, b: FAST) -> None:
        self.now_s, self.link = 1000.0, link
        self.sessions = AgentSessions(1e9, lambda: None, lambda: self.now_s)
        self.written: list[NodeRecord] = []
        self.events: list[NewEvent] = []
        self.asked: list[agents_pb2.MeasureLink] = []
        self.board = LinkBoard(self.sessions, self._write, self.events.append, lambda: None, lambda: self.now_s)

    async def _write(self, record: NodeRecord) -> None:
        self.written.append(record)

    def join(self, name: str, **fields: Any) -> AgentSession:
        given = {"island": "", "host": f"host-{name}", "named_island": fields.pop("named", "")} | fields
        session = AgentSession(f"of-{name}", self.board.place(replace(node(name).record, **given)), self.now_s)
        session.links_port, session.links_secret = 20_000, name.encode().ljust(32)
        self.sessions.admit(session)
        return session

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.board.run()), asyncio.create_task(self._answer())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self) -> None:
        while True:
            self.now_s += 1.0
            for name, session in list(self.sessions.connected.items()):
                while session.waiting:
                    message = await session.next_message()
                    assert isinstance(message, agents_pb2.ControllerMessage)
                    self.asked.append(message.measure_link)
                    self.board.on_measured(session, self.answer(name, message.measure_link.node))
            await asyncio.sleep(0.01)

    def answer(self, by: str, to: str) -> agents_pb2.LinkMeasured:
        bps = self.link(by, to)
        if not bps:
            return agents_pb2.LinkMeasured(node=to, busy_s=0.1, trouble="refused")
        rtt_s = 0.0002 if bps == FAST else 0.02
        return agents_pb2.LinkMeasured(node=to, rtt_s=rtt_s, to_bps=bps, from_bps=self.link(to, by), busy_s=0.1)

    def islands(self) -> list[str]:
        found: dict[str, list[str]] = {}
        for name, session in sorted(self.sessions.connected.items()):
            found.setdefault(session.record.island, []).append(name)
        return sorted(" ".join(names) for names in found.values())


async def until(what: str, condition: Callable[[], object]) -> None:
    ends_s = asyncio.get_running_loop().time() + 30
    while not condition():
        assert asyncio.get_running_loop().time() < ends_s, f"not within 30 s: {what}"
        await asyncio.sleep(0.01)


def by_letter(a: str, b: str) -> float:
    return FAST if a[0] == b[0] else THIN


async def test_agents_measure_each_other_and_islands_follow_with_reasons_and_events() -> None:
    world = World(by_letter)
    for name in ("a1", "a2", "b1", "b2"):
        world.join(name)
    assert world.islands() == ["a1", "a2", "b1", "b2"]  # nothing is known
    async with world.running():
        await until("two islands", lambda: world.islands() == ["a1 a2", "b1 b2"])
        await until("all pairs confirmed", lambda: len(world.asked) == 12)
    one = world.asked[0]
    assert (one.address, one.port, one.relayed) == (f"{one.node}.lan", 20_000, False)
    assert one.key in {node_key(one.node.encode().ljust(32), name) for name in ("a1", "a2", "b1", "b2")}
    record = world.sessions.connected["a2"].record
    assert record.island_reason.startswith("900 Mbit/s and 0.2 ms between its nodes; ")
    assert record.island in {kept.island for kept in world.written if kept.name == "a2"}
    told = [event for event in world.events if event.node == "a2"]
    assert [event.kind for event in told] == [EventKind.ISLAND_CHANGED]
    assert told[0].text.startswith(f"node a2 is now in island {record.island}, before lan-2: ")
    link = world.board.links.between(["a1", "a2"], ["b1", "b2"])
    assert link is not None
    assert (link.bandwidth_bps, link.rtt_s) == (THIN, 0.02)
    assert world.board.links_of("a1").keys() == {"a2", "b1", "b2"}


async def test_a_link_that_falls_moves_a_node_after_a_second_reading_and_its_island_is_split() -> None:
    world = World()
    for name in ("a1", "a2", "a3"):
        world.join(name)
    async with world.running():
        await until("one island", lambda: world.islands() == ["a1 a2 a3"])
        world.link = lambda a, b: THIN if "a3" in (a, b) else FAST
        await until("a3 is alone", lambda: world.islands() == ["a1 a2", "a3"])
    assert world.sessions.connected["a1"].record.island == "lan-1"  # who stays keeps the name


def test_local_agents_are_one_island_from_the_start_and_an_operators_name_wins() -> None:
    world = World()
    for number in range(3):
        world.join(f"local-{number}", host="box", address="127.0.0.1")
    world.join("named", host="box", named="lab")
    assert world.islands() == ["local-0 local-1 local-2", "named"]
    assert {session.record.island for session in world.sessions.connected.values()} == {"lan-1", "lab"}


async def test_local_agents_measure_nothing_among_themselves() -> None:
    world = World()
    for number in range(3):
        world.join(f"local-{number}", host="box", address="127.0.0.1")
    async with world.running():
        reasons = lambda: {session.record.island_reason for session in world.sessions.connected.values()}  # noqa: E731
        await until("a reason", lambda: reasons() == {"all on one host"})
    assert world.asked == []
    assert world.events == []


async def test_a_laptop_behind_nat_is_measured_through_the_relay_and_is_its_own_island() -> None:
    world = World()
    for name in ("a1", "a2"):
        world.join(name)
    world.join("laptop", behind_nat=True)
    async with world.running():
        await until("measured", lambda: len(world.board.links_of("laptop")) == 2)
        await until("islands", lambda: world.islands() == ["a1 a2", "laptop"])
    assert world.sessions.connected["laptop"].record.island == "laptop"
    assert all(one.relayed for one in world.asked if one.node == "laptop")
    assert any(one.relayed for one in world.asked)


async def test_a_link_that_cannot_be_measured_is_tried_from_the_other_end_and_says_why() -> None:
    world = World(lambda a, b: 0.0 if (a, b) == ("a1", "a2") else FAST)
    world.join("a1")
    world.join("a2")
    async with world.running():
        await until("trouble", lambda: world.board.trouble_of("a1"))
        assert world.board.trouble_of("a1") == "a2 could not be measured: refused"
        await until("the other end", lambda: world.board.links_of("a2"))
    assert [one.node for one in world.asked[:2]] == ["a2", "a1"]


def test_an_agent_that_registers_again_keeps_its_island_unless_it_moved() -> None:
    world = World()
    world.board.remember(replace(node("a").record, island="lan-7", island_reason="measured", host="host-a"))
    assert world.join("a").record.island == "lan-7"
    assert world.join("a", address="elsewhere.lan").record.island == "lan-1"


def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    world = World()
    session = world.join("a1")
    world.join("a2")
    world.board.on_measured(session, world.answer("a1", "a2"))
    assert not world.board.links_of("a1")


def test_a_training_node_confirms_a_doubtful_reading_soon_and_rests_for_it_afterwards() -> None:
    """Readings of 0.2 s each, at most 2 % of the time: 9.8 s of rest for each. The first is confirmed after 5 s."""
    world = World()
    sessions = [world.join(name) for name in ("a1", "a2")]
    for session in sessions:
        session.workers = {WorkerKey("job", 1, 0): ObservedWorker(WorkerPhase.RUNNING)}
    asked_s = []
    while len(asked_s) < 4:
        world.board.look()
        if sessions[0].waiting:
            asyncio.run(sessions[0].next_message())
            asked_s.append(world.now_s)
            world.now_s += 0.2
            report = world.answer("a1", "a2")
            report.busy_s = 0.2
            world.board.on_measured(sessions[0], report)
        world.now_s += 0.1
    pauses = [later - earlier for earlier, later in pairwise(asked_s)]
    assert pauses == pytest.approx([5.2, 14.8, 10.2], abs=0.25)


async def test_runs_wait_for_the_first_measurement_of_a_node_but_not_for_long() -> None:
    world = World()
    for name in ("a1", "a2", "dead"):
        world.join(name)
    world.join("local-0", host="box", address="127.0.0.1", named="lab")
    world.board.look()
    assert world.board.unmeasured() == {"a1", "a2", "dead"}
    world.link = lambda a, b: 0.0 if "dead" in (a, b) else FAST
    async with world.running():
        await until("a1 and a2 are measured", lambda: not world.board.unmeasured())
    again = World()
    again.join("a1")
    again.join("a2")
    again.board.look()
    again.now_s += FIRST_MEASUREMENTS_S + 0.1
    assert not again.board.unmeasured()
