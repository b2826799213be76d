from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from made import JOB, NOW_S, node

from atoll.controller.jobs.agents.sessions import (
    GONE_NODES,
    OUTBOX_MESSAGES,
    RESEND_S,
    AgentSession,
    AgentSessions,
    NameTaken,
)
from atoll.controller.jobs.model.exits import is_lost
from atoll.controller.jobs.model.observed import RETURN_GRACE_S, PassClock, WorkerPhase
from atoll.controller.state.records import WorkerExitKind
from atoll.jobs.worker_key import WorkerKey
from atoll.v1 import agents_pb2, common_pb2

MESSAGE = agents_pb2.ControllerMessage(forget=agents_pb2.Forget())


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, look: Callable[[], None]) -> None:
        """Time goes on, and somebody looks all the while."""
        ends_s = self.now_s + seconds
        while self.now_s < ends_s - 1e-9:
            self.now_s = min(self.now_s + 0.1, ends_s)
            look()


def session(id: str = "one", name: str = "a") -> AgentSession:
    return AgentSession(id, node(name).record, NOW_S)


def status(state: int, **fields: object) -> common_pb2.WorkerStatus:
    return common_pb2.WorkerStatus(id=common_pb2.WorkerId(job=JOB, run=1, rank=0), state=state, **fields)  # type: ignore[arg-type]


def test_a_name_is_held_by_a_live_agent_and_free_when_it_went_silent() -> None:
    clock, changes = Clock(), []
    sessions = AgentSessions(3.0, lambda: changes.append(1), clock)
    first = session()
    sessions.admit(first)
    with pytest.raises(NameTaken):
        sessions.admit(session("two"))
    clock.sleep(3.1, sessions.end_silent)
    second = session("two")
    sessions.admit(second)
    assert first.ended.is_set()
    assert sessions.connected == {"a": second}
    sessions.leave(first)  # its stream ends late
    assert sessions.connected == {"a": second}
    assert len(changes) == 3


def test_a_nodes_devices_are_as_they_last_said_and_no_others() -> None:
    one = session()
    own = [device.index for device in one.record.devices]
    one.sampled([common_pb2.DeviceSample(index=index, utilisation=0.5) for index in (*own, 99)])
    one.sampled([])  # of the workers only
    assert [(sample.index, sample.utilisation) for sample in one.samples] == [(index, 0.5) for index in own]
    one.sampled([common_pb2.DeviceSample(index=own[0])])  # it fell off the bus
    assert [(sample.index, sample.HasField("utilisation")) for sample in one.samples] == [(own[0], False)]


def test_what_nodes_there_are() -> None:
    sessions = AgentSessions(3.0, lambda: None, Clock())
    sessions.remembered = {"old": node("old").record, "a": node("a").record}
    first, second = session(), session("two", "b")
    sessions.admit(first)
    sessions.admit(second)
    sessions.leave(second)
    observed = sessions.nodes()
    assert {name: (n.connected, n.last_message_s) for name, n in observed.items()} == {
        "a": (True, NOW_S),
        "b": (False, NOW_S),
        "old": (False, None),
    }
    assert set(sessions.nodes_named(["a", "nowhere"])) == {"a"}


def test_a_silent_stream_is_ended_with_its_lease() -> None:
    clock = Clock()
    sessions = AgentSessions(3.0, lambda: None, clock)
    one = session()
    sessions.admit(one)
    clock.sleep(2.9, sessions.end_silent)
    assert not one.ended.is_set()
    clock.sleep(0.2, sessions.end_silent)
    assert one.ended.is_set()
    assert "no message came for 3.1 s" in str(one.why)


def test_what_the_controller_slept_through_is_held_against_no_agent() -> None:
    """1. An agent was heard a second ago. 2. The controller is stopped for a minute. 3. Before it has read what came
    meanwhile it looks: nobody is silent for longer than before. 4. Who then really says nothing is ended in time."""
    clock = Clock()
    sessions = AgentSessions(3.0, lambda: None, clock)
    one, gone = session(), session("two", "b")
    for each in (one, gone):
        sessions.admit(each)
    sessions.leave(gone)
    clock.sleep(1.0, sessions.end_silent)
    clock.now_s += 60
    sessions.end_silent()
    assert sessions.connected == {"a": one}
    silent = {name: clock.now_s - (node.last_message_s or 0) for name, node in sessions.nodes().items()}
    assert silent == pytest.approx({"a": 1.0, "b": 1.0})
    clock.sleep(1.9, sessions.end_silent)
    assert not one.ended.is_set()
    clock.sleep(0.2, sessions.end_silent)
    assert one.ended.is_set()


def test_a_thousand_streams_that_end_at_once_lose_no_node_before_its_lease_ends() -> None:
    """1. A controller leads for an hour, 1,000 agents are connected. 2. All their streams end at one moment, by a
    switch that is restarted. 3. 10 ms later none counts as lost, each is known to have spoken just now. 4. Two seconds
    later half of them are back. 5. The leases of the others end: these are lost, and only the newest are remembered."""
    clock = Clock()
    sessions = AgentSessions(3.0, lambda: None, clock)
    clock.sleep(3600, sessions.end_silent)
    all_of_them = [session(f"{i}", f"n{i}") for i in range(1000)]
    for one in all_of_them:
        one.last_message_s = clock.now_s
        sessions.admit(one)
    for one in all_of_them:
        sessions.leave(one)

    def lost() -> list[str]:
        now = PassClock(clock.now_s, 0.0, sessions.awaiting_since_s, 3.0)
        known = sessions.nodes()
        return [one.record.name for one in all_of_them if is_lost(known.get(one.record.name), now)]

    clock.sleep(0.01, lambda: sessions.forget_lost(()))
    known = sessions.nodes()
    assert lost() == []
    assert {known[one.record.name].last_message_s for one in all_of_them} == {clock.now_s - 0.01}
    clock.sleep(2, lambda: sessions.forget_lost(()))
    for one in all_of_them[:500]:
        one.last_message_s = clock.now_s
        sessions.admit(one)
    clock.sleep(1.1, sessions.end_silent)
    assert lost() == [one.record.name for one in all_of_them[500:]]
    clock.sleep(0.5, sessions.end_silent)
    sessions.forget_lost({"n999"})
    assert len(sessions.gone) == GONE_NODES + 1, "one is still to be told of"
    assert "n999" in sessions.gone


def test_a_new_leader_that_stands_still_gives_agents_their_time_to_come_back_nevertheless() -> None:
    """1. A new leader knows of node old, and waits for it. 2. It is stopped for a minute at once. 3. Then old still
    has the rest of its time to come back."""
    clock = Clock()
    sessions = AgentSessions(3.0, lambda: None, clock)
    sessions.remember({"old": node("old").record})
    clock.sleep(1.0, sessions.end_silent)
    clock.now_s += 60
    sessions.end_silent()

    def lost() -> bool:
        return is_lost(sessions.nodes()["old"], PassClock(clock.now_s, 0.0, sessions.awaiting_since_s, 3.0))

    assert not lost()
    clock.sleep(RETURN_GRACE_S - 1.1, sessions.end_silent)
    assert not lost()
    clock.sleep(0.2, sessions.end_silent)
    assert lost()


async def test_the_end_of_a_lease_is_looked_at_when_it_comes() -> None:
    looked = asyncio.Event()
    sessions = AgentSessions(0.2, looked.set, time.monotonic)
    sessions.admit(AgentSession("one", node("a").record, time.monotonic()))
    looked.clear()
    watching = asyncio.create_task(sessions.watch())
    async with asyncio.timeout(30):
        await looked.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert time.monotonic() - sessions.connected["a"].last_message_s >= 0.2


def test_instructions_are_repeated_but_not_all_the_time() -> None:
    one = session()
    for now_s in (0.0, 0.5, RESEND_S - 0.1, RESEND_S, RESEND_S + 1):
        one.send_unless_recent("topic", lambda: MESSAGE, now_s)
    one.send_unless_recent("another", lambda: MESSAGE, 0.1)
    assert one.waiting == 3


async def test_an_agent_that_takes_nothing_is_cut_off() -> None:
    one = session()
    for _ in range(OUTBOX_MESSAGES):
        one.send(MESSAGE)
    assert not one.ended.is_set()
    one.send(MESSAGE)
    assert one.ended.is_set()
    assert await one.next_message() is None


def test_only_changes_that_matter_wake_the_reconciler() -> None:
    one = session()
    running = common_pb2.WORKER_STATE_RUNNING
    assert one.report([status(running)], [29500])
    assert not one.report([status(running, step=7)], [29500])
    assert one.report([status(running, step=8, uses_atoll=True)], [29500])
    assert one.report([status(common_pb2.WORKER_STATE_EXITED)], [29500])
    assert one.report([], [29500])
    assert one.report([], [])


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        (0, common_pb2.EXIT_KIND_FINISHED, WorkerExitKind.FINISHED),
        (-9, common_pb2.EXIT_KIND_SIGNALLED, WorkerExitKind.SIGNALLED),
        (3, common_pb2.EXIT_KIND_UNSPECIFIED, WorkerExitKind.FAILED),  # an end that this version does not know
        (-9, common_pb2.EXIT_KIND_UNRESPONSIVE, WorkerExitKind.UNRESPONSIVE),
    ],
)
def test_how_a_worker_ended(code: int, kind: int, expected: WorkerExitKind) -> None:
    one = session()
    one.report([status(common_pb2.WORKER_STATE_EXITED, exit_code=code, exit_kind=kind)], [])
    worker = one.workers[WorkerKey(JOB, 1, 0)]
    assert worker.phase is WorkerPhase.EXITED
    assert worker.exit is not None
    assert (worker.exit.kind, worker.exit.code) == (expected, code)


async def test_what_waits_for_an_agent_is_made_when_it_is_sent() -> None:
    """1. A launch of 4,096 workers waits for each of 512 nodes: serialised, that was 1.2 GiB in the controller. 2. Now
    each is made as its stream takes it."""
    made = []

    def launch(number: int) -> bytes:
        made.append(number)
        return bytes(number)

    queued = session()
    for number in range(3):
        queued.send_unless_recent(number, lambda number=number: launch(number), NOW_S)  # type: ignore[misc]
    assert (queued.waiting, made) == (3, [])
    assert await queued.next_message() == b""
    assert await queued.next_message() == bytes(1)
    assert (queued.waiting, made) == (1, [0, 1])
