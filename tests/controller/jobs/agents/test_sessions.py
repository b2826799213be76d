from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from made import JOB, NOW_S, node

from atoll.controller.jobs.agents.sessions import OUTBOX_MESSAGES, RESEND_S, AgentSession, AgentSessions, NameTaken
from atoll.controller.jobs.lifecycle.observed import WorkerPhase
from atoll.controller.state.records import WorkerExitKind
from atoll.v1 import agents_pb2, common_pb2
from atoll.worker_key import WorkerKey

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
    return AgentSession(id, node(name).record, 0, NOW_S)


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
    assert {name: (n.connected, n.heard_s) for name, n in observed.items()} == {
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
    assert "nothing heard for 3.1 s" in str(one.why)


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
    silent = {name: clock.now_s - (node.heard_s or 0) for name, node in sessions.nodes().items()}
    assert silent == pytest.approx({"a": 1.0, "b": 1.0})
    clock.sleep(1.9, sessions.end_silent)
    assert not one.ended.is_set()
    clock.sleep(0.2, sessions.end_silent)
    assert one.ended.is_set()


async def test_the_end_of_a_lease_is_looked_at_when_it_comes() -> None:
    looked = asyncio.Event()
    sessions = AgentSessions(0.2, looked.set, time.monotonic)
    sessions.admit(AgentSession("one", node("a").record, 0, time.monotonic()))
    looked.clear()
    watching = asyncio.create_task(sessions.watch())
    async with asyncio.timeout(5):
        await looked.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert time.monotonic() - sessions.connected["a"].heard_s >= 0.2


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
        (0, common_pb2.EXIT_KIND_UNSPECIFIED, WorkerExitKind.FINISHED),
        (75, common_pb2.EXIT_KIND_UNSPECIFIED, WorkerExitKind.PEER_LOST),
        (85, common_pb2.EXIT_KIND_UNSPECIFIED, WorkerExitKind.DRAINED),
        (-9, common_pb2.EXIT_KIND_UNSPECIFIED, WorkerExitKind.SIGNALLED),
        (3, common_pb2.EXIT_KIND_UNSPECIFIED, WorkerExitKind.FAILED),
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
