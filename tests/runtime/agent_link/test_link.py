"""The worker's link against a real ROUTER socket that plays the agent."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from zmq_agent import FakeAgent

from atoll.agent.runtime.agent_link import waiting
from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.agent.runtime.agent_link.outbox import Outbox
from atoll.agent.runtime.agent_link.place import AgentEndpoint, WorkerPlace
from atoll.errors import BadInput, DeadlineExceeded
from atoll.telemetry.telemetry_limits import MAX_LINKS, MAX_STEPS
from atoll.v1.common_pb2 import LEVEL_INFO, LinkSample, Plan, StepSample, WorkerId
from atoll.v1.worker_pb2 import Stop, SupervisorMessage


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path, world_size=2) as started:
        yield started


def place_of(agent: FakeAgent, rank: int = 1, secret: str | None = None) -> tuple[WorkerPlace, AgentEndpoint]:
    endpoint = AgentEndpoint(agent.endpoint, agent.job, agent.run, rank, secret or agent.secret)
    return WorkerPlace(rank, agent.world_size, rank, agent.world_size, "127.0.0.1", endpoint), endpoint


def test_worker_is_welcomed_lives_and_says_its_last_words(agent: FakeAgent) -> None:
    agent.shares = (3.0, 1.0)
    agent.speed = 0.5
    link = AgentLink(*place_of(agent))
    try:
        assert link.welcome.speed == 0.5
        assert list(link.welcome.launch.plan.shares) == [3.0, 1.0]
        link.step = 17
        agent.wait_until(lambda: agent.alive.get(1) == (17, 0) and agent.alive_count >= 3, deadline_s=30)
        link.outbox.step(StepSample(step=17, local_batch=3))
        link.outbox.metrics(17, {"loss": 0.25})
        link.outbox.notice(LEVEL_INFO, "on the way out")
    finally:
        link.close()
    agent.wait_until(lambda: bool(agent.notices), deadline_s=30)  # behind, or beside, all else that was said
    assert [sample.step for sample in agent.steps[1]] == [17]
    assert dict(agent.metrics[1][0].values) == {"loss": 0.25}
    assert [notice.text for notice in agent.notices] == ["on the way out"]


def test_plans_come_in_order_and_those_that_cannot_be_are_refused_with_a_notice(agent: FakeAgent) -> None:
    link = AgentLink(*place_of(agent))
    try:
        agent.send_plan(2, 5, (1.0, 2.0), 1)
        agent.send(1, SupervisorMessage(plan=Plan(id=0, run=agent.run, shares=(1.0, 1.0))))
        agent.send(1, SupervisorMessage(plan=Plan(id=4, run=99, shares=(1.0, 1.0))))
        agent.send_plan(5, 7, (4.0, 2.0), 1)
        taken: list[int] = []

        def all_taken() -> bool:
            taken.extend(plan.id for plan in link.take_plans())
            return taken == [2, 5]

        agent.wait_until(all_taken, deadline_s=30)
        agent.wait_until(lambda: len(agent.notices) == 2, deadline_s=30)
        assert "refused plan 0" in agent.notices[0].text
        assert "run 99" in agent.notices[1].text
    finally:
        link.close()


def test_stop_that_is_not_obeyed_is_overdue_after_half_its_grace(agent: FakeAgent) -> None:
    overdue: list[Stop] = []
    link = AgentLink(*place_of(agent))
    link.on_overdue = overdue.append
    try:
        agent.send_stop(1, grace_s=0.4)
        agent.wait_until(lambda: link.stop is not None and bool(overdue), deadline_s=30)
        assert [stop.grace_s for stop in overdue] == [0.4]
    finally:
        link.close()


def test_a_long_wait_for_a_batch_is_an_event(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose loader hung before the first step was "running" without an event. Each wait is reported once, and
    not before three times the longest so far."""
    monkeypatch.setattr(waiting, "LONG_WAIT_S", 0.2)
    link = AgentLink(*place_of(agent))
    try:
        with waiting.batch_wait.begun("the dataset has given none in step 0"):
            agent.wait_until(lambda: bool(agent.notices), deadline_s=30)
            waited_s = waiting.batch_wait.waited_s(time.monotonic())
            assert waiting.batch_wait.report(math.inf) is None
    finally:
        link.close()
    (notice,) = agent.notices
    assert notice.text.startswith("no batch for ")
    assert notice.text.endswith(" s: the dataset has given none in step 0")
    with waiting.batch_wait.begun("the same in step 1"):
        assert waiting.batch_wait.report(time.monotonic() + 2 * waited_s) is None
        assert waiting.batch_wait.report(time.monotonic() + 100 * waited_s + 100) is not None


def test_agent_that_does_not_answer_is_named_at_the_deadline(agent: FakeAgent) -> None:
    agent.answer_hello = False
    with pytest.raises(DeadlineExceeded, match=r"agent-1\.sock did not answer within 2 s"):
        AgentLink(*place_of(agent), welcome_deadline_s=2.0)
    agent.wait_until(lambda: len(agent.hellos) >= 3, deadline_s=30)  # repeated, not said once and lost


def test_welcome_for_another_world_is_refused(agent: FakeAgent) -> None:
    agent.world_size = 3
    place, endpoint = place_of(agent)
    agent.world_size = 2
    with pytest.raises(BadInput, match="of 2; this worker is tiny-test run 1 rank 1 of 3"):
        AgentLink(place, endpoint)


def test_outbox_drops_the_oldest_steps_and_counts_them() -> None:
    outbox = Outbox()
    worker = WorkerId(job="j", run=1, rank=0)
    assert outbox.take(worker) is None
    for step in range(MAX_STEPS + 10):
        outbox.step(StepSample(step=step))
    outbox.add(checkpoint_step=5)
    telemetry = outbox.take(worker)
    assert telemetry is not None
    assert (telemetry.steps[0].step, len(telemetry.steps), telemetry.dropped_steps) == (10, MAX_STEPS, 10)
    assert telemetry.checkpoint_step == 5
    assert outbox.take(worker) is None


def test_outbox_tells_the_newest_of_each_link_and_the_rest_with_the_next_turn() -> None:
    outbox = Outbox()
    worker = WorkerId(job="j", run=1, rank=0)
    sent = iter(range(1, 5))

    def links() -> list[LinkSample]:
        now = next(sent)
        return [LinkSample(peer=peer, sent_bytes=now) for peer in range(MAX_LINKS + 1)]

    outbox.links_so_far = links
    first, second = outbox.take(worker), outbox.take(worker)
    assert first is not None
    assert second is not None
    assert [link.peer for link in first.links] == list(range(MAX_LINKS))
    assert MAX_LINKS in [link.peer for link in second.links]
    assert {link.sent_bytes for link in first.links} == {1}
    assert {link.sent_bytes for link in second.links} == {2}


def test_outbox_tells_of_no_link_of_an_earlier_view() -> None:
    """1. The links of view 1 are told of while a step lasts. 2. Once view 2 began they are not: ranks have moved up."""
    outbox = Outbox()
    worker = WorkerId(job="j", run=1, rank=0)
    outbox.links_so_far = lambda: [LinkSample(peer=1, sent_bytes=7)]
    told = outbox.take(worker)
    assert told is not None
    assert [(link.peer, link.sent_bytes) for link in told.links] == [(1, 7)]
    outbox.begin_view(2, worker)
    assert outbox.take(worker) is None
