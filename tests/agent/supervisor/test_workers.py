"""The socket where workers speak: real ZeroMQ, a fake worker on the other end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from agent_harness import until

from atoll.agent.supervisor.worker_socket import WorkerSocket
from atoll.agent.telemetry.collect import Collector
from atoll.jobs.worker_key import WorkerKey
from atoll.telemetry.telemetry_limits import MAX_METRICS, MAX_REPORTS, MAX_STEPS
from atoll.v1.agents_pb2 import Launch, Notice, PlanForJob, Prepared, View, WorkerTelemetry
from atoll.v1.common_pb2 import LinkSample, Metrics, Plan, StepSample, StrategyMessage, WorkerId
from atoll.v1.worker_pb2 import Alive, Hello, OpenPassage, Passage, SupervisorMessage, Welcome, WorkerMessage

KEY = WorkerKey("job-1", 2, 0)


def _none(key: WorkerKey, asked: OpenPassage) -> Passage:
    return Passage(asked=asked, trouble="none here")


class Heard:
    def __init__(self) -> None:
        self.hellos: list[WorkerKey] = []
        self.alive: list[tuple[WorkerKey, Alive]] = []
        self.strategy: list[StrategyMessage] = []


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
async def workers(tmp_path: Path, heard: Heard, collector: Collector) -> AsyncIterator[WorkerSocket]:
    opened = WorkerSocket(
        tmp_path,
        collector,
        heard.hellos.append,
        lambda *said: heard.alive.append(said),
        heard.strategy.append,
        on_passage=lambda key, asked: Passage(asked=asked, port=4711 + key.rank),
    )
    running = asyncio.create_task(opened.run())
    launch = Launch(id=WorkerId(job=KEY.job, run=KEY.run), world_size=1, plan=Plan(id=1, run=2, shares=[1.0]))
    opened.expect(KEY, "secret", Welcome(launch=launch, job_directory="/jobs/job-1", speed=0.4))
    yield opened
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    opened.close()


class FakeWorker:
    def __init__(self, endpoint: str, run: int = 2, identity: str | None = None) -> None:
        self.id = WorkerId(job="job-1", run=run, rank=0)
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, (identity or f"job-1/{run}/0").encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    async def __aenter__(self) -> FakeWorker:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    async def say(self, **body: object) -> None:
        await self.socket.send(WorkerMessage(id=self.id, **body).SerializeToString())  # type: ignore[arg-type]

    async def hear(self) -> SupervisorMessage:
        frames = await asyncio.wait_for(self.socket.recv_multipart(), 30)
        return SupervisorMessage.FromString(frames[-1])


async def test_hello_is_answered_each_time_with_all_plans(workers: WorkerSocket, heard: Heard) -> None:
    for id in (2, 3, 3, 2):  # repeated and out of order: only what is newer counts
        workers.send_plan(PlanForJob(job="job-1", plan=Plan(id=id, run=2, shares=[1.0])))
    workers.send_plan(PlanForJob(job="job-1", plan=Plan(id=9, run=1, shares=[1.0])))
    workers.send_plan(PlanForJob(job="other", plan=Plan(id=9, run=2, shares=[1.0])))
    async with FakeWorker(workers.endpoint) as worker:
        for _ in range(2):
            await worker.say(hello=Hello(pid=1, secret="secret"))
            welcome = (await worker.hear()).welcome
            assert (welcome.launch.plan.id, [plan.id for plan in welcome.plans]) == (1, [2, 3])
            assert (welcome.job_directory, welcome.speed) == ("/jobs/job-1", 0.4)
        assert heard.hellos == [KEY, KEY]
        await worker.say(alive=Alive(step=7, plan=3))
        await until("the sign of life", lambda: heard.alive == [(KEY, Alive(step=7, plan=3))])


async def test_plans_and_stop_reach_a_worker_in_order(workers: WorkerSocket) -> None:
    async with FakeWorker(workers.endpoint) as worker:
        await worker.say(hello=Hello(secret="secret"))
        assert (await worker.hear()).HasField("welcome")
        for id in (2, 3, 4):
            workers.send_plan(PlanForJob(job="job-1", plan=Plan(id=id, run=2, shares=[1.0])))
        workers.send_stop(KEY, 5.0, "to grow")
        heard = [await worker.hear() for _ in range(4)]
        assert [message.plan.id for message in heard[:3]] == [2, 3, 4]
        assert (heard[3].stop.grace_s, heard[3].stop.reason) == (5.0, "to grow")


async def test_the_newest_view_reaches_a_worker_and_nothing_older(workers: WorkerSocket) -> None:
    """1. Two views come before the worker said Hello: its Welcome has the newer one. 2. The same again and an older
    one are not passed on. 3. That it is in force is, and so is a newer one. 4. Views of other runs are not."""
    first, second = View(job="job-1", run=2, view=2), View(job="job-1", run=2, view=3)
    workers.send_view(first)
    workers.send_view(second)
    workers.send_view(View(job="job-1", run=1, view=9))
    async with FakeWorker(workers.endpoint) as worker:
        await worker.say(hello=Hello(secret="secret"))
        assert (await worker.hear()).welcome.view == second
        workers.send_view(first)
        workers.send_view(second)
        told = [View(job="job-1", run=2, view=3, in_force=3), View(job="job-1", run=2, view=4, in_force=3)]
        for view in told:
            workers.send_view(view)
        assert [(await worker.hear()).view for _ in told] == told


async def test_messages_of_a_strategy_pass_both_ways_and_those_of_another_run_do_not(
    workers: WorkerSocket, heard: Heard
) -> None:
    async with FakeWorker(workers.endpoint) as worker:
        await worker.say(strategy=StrategyMessage(body="before hello"))
        await worker.say(hello=Hello(secret="secret"))
        assert (await worker.hear()).HasField("welcome")
        await worker.say(strategy=StrategyMessage(id=WorkerId(job="other", run=9), body='{"question":1}'))
        await worker.say(strategy=StrategyMessage(body="x" * 20_000))
        await until("both", lambda: workers.dropped["strategy message too large"] == 1)
        assert heard.strategy == [StrategyMessage(id=worker.id, body='{"question":1}')]
        workers.send_strategy(WorkerKey("job-1", 1, 0), StrategyMessage(body="of an older run"))
        workers.send_strategy(KEY, StrategyMessage(id=worker.id, body='{"answer":2}'))
        assert (await worker.hear()).strategy.body == '{"answer":2}'


async def test_who_asks_for_a_passage_is_told_of_a_port(workers: WorkerSocket) -> None:
    async with FakeWorker(workers.endpoint) as worker:
        await worker.say(hello=Hello(secret="secret"))
        assert (await worker.hear()).HasField("welcome")
        asked = OpenPassage(rank=1, port=29500, seal=True)
        await worker.say(open_passage=asked)
        assert (await worker.hear()).passage == Passage(asked=asked, port=4711)


async def test_stop_before_hello_follows_the_welcome(workers: WorkerSocket) -> None:
    workers.send_stop(KEY, 5.0, "cancelled")
    async with FakeWorker(workers.endpoint) as worker:
        await worker.say(hello=Hello(secret="secret"))
        assert (await worker.hear()).HasField("welcome")
        assert (await worker.hear()).stop.reason == "cancelled"


async def test_strangers_are_dropped_and_counted(workers: WorkerSocket, heard: Heard, collector: Collector) -> None:
    async with FakeWorker(workers.endpoint) as impostor:
        await impostor.say(hello=Hello(secret="wrong"))
        await impostor.say(alive=Alive(step=99))
        await impostor.socket.send(b"\xff\xff\xff")
        await impostor.socket.send_multipart([b"a", b"b"])
        await until("four were dropped", lambda: workers.dropped.total() == 4)
    async with FakeWorker(workers.endpoint, run=1) as older:
        await older.say(hello=Hello(secret="secret"))
        await until("the older run's", lambda: workers.dropped["no such worker"] == 1)
    async with FakeWorker(workers.endpoint, identity="job-1/2/1") as other:
        await other.say(hello=Hello(secret="secret"))
        await until("the wrong identity's", lambda: workers.dropped["identity is not the id"] == 1)
    assert workers.dropped["wrong secret"] == workers.dropped["no hello before"] == workers.dropped["malformed"] == 1
    assert (heard.hellos, heard.alive) == ([], [])
    (telemetry,) = collector.take()
    assert any("wrong secret" in notice.text for notice in telemetry.workers[0].notices)


async def test_worker_that_is_gone_speaks_no_more(workers: WorkerSocket, heard: Heard) -> None:
    async with FakeWorker(workers.endpoint) as worker:
        await worker.say(hello=Hello(secret="secret"))
        await worker.hear()
        workers.release(KEY)
        await worker.say(alive=Alive(step=99))
        await until("it is dropped", lambda: workers.dropped["no such worker"] == 1)
    assert heard.alive == []


async def test_telemetry_is_collected_bounded_and_counted(
    workers: WorkerSocket, heard: Heard, collector: Collector
) -> None:
    async with FakeWorker(workers.endpoint) as worker:
        await worker.say(hello=Hello(secret="secret"))
        await worker.hear()
        for block in range(3):
            steps = [StepSample(step=200 * block + n) for n in range(200)]
            values = {f"value-{n}": 1.0 for n in range(100)}
            await worker.say(
                telemetry=WorkerTelemetry(
                    steps=steps,
                    dropped_steps=5,
                    metrics=[Metrics(step=block, values=values)] * 100,
                    notices=[Notice(text="x" * 9000)] * 100,
                    checkpoint_step=100 * block,
                )
            )
        await worker.say(alive=Alive())
        await until("what was said last", lambda: heard.alive)
    (telemetry,) = collector.take()
    (mine,) = telemetry.workers
    assert [step.step for step in mine.steps] == list(range(600 - MAX_STEPS, 600))
    assert mine.dropped_steps == 600 - MAX_STEPS + 5
    assert (len(mine.metrics), len(mine.metrics[0].values)) == (MAX_REPORTS, MAX_METRICS)
    assert (len(mine.notices), len(mine.notices[0].text)) == (64, 4096)
    assert mine.checkpoint_step == 200
    assert list(collector.take()) == []


def test_links_are_told_64_at_a_time_the_newest_of_each_and_no_nonsense() -> None:
    """A worker of an older or broken version must not have the controller refuse all that its agent says."""
    collector = Collector()
    for sent in (1, 2):
        collector.add(KEY, WorkerTelemetry(links=[LinkSample(peer=peer, sent_bytes=sent) for peer in range(40)]))
    reasons = {f"reason {n:02}": n for n in range(20)} | {"x" * 300: 1}
    collector.add(KEY, WorkerTelemetry(links=[LinkSample(peer=peer, dropped=reasons) for peer in range(40, 80)]))
    wrong = [LinkSample(peer=5000), LinkSample(peer=90, busy_s=float("nan")), LinkSample(peer=91, goodput_bps=-1)]
    wrong += [LinkSample(peer=5000, volunteer="v/0"), LinkSample(peer=92, form="int3")]
    wrong += [LinkSample(peer=93, wait_share=1.1), LinkSample(peer=94, differs=float("inf"))]
    collector.add(KEY, WorkerTelemetry(links=wrong))
    told = [[*message.workers[0].links] for _ in range(2) for message in collector.take()]
    assert [len(links) for links in told] == [64, 16]
    assert [link.peer for links in told for link in links] == list(range(80))
    assert (told[0][0].sent_bytes, len(told[1][0].dropped)) == (2, 16)
    assert list(collector.take()) == []


def test_steps_that_make_no_sense_are_dropped_and_counted() -> None:
    collector = Collector()
    good = StepSample(
        step=3,
        step_s=0.1,
        backward_s=0.05,
        strategy_metrics={"fresh_share": 1.0, "sent_bytes": 1e9},
        local_grad_sqnorm=1e30,
    )
    nonsense = [
        StepSample(step_s=float("nan")),
        StepSample(load_s=-1e-9),
        StepSample(last_sync_s=float("inf")),
        StepSample(global_grad_sqnorm=float("inf")),
        StepSample(strategy_metrics={"fresh_share": 1.5}),
        StepSample(strategy_metrics={"stall_s": float("nan")}),
        StepSample(strategy_metrics={"of no strategy": 1.0}),
    ]
    collector.add(KEY, WorkerTelemetry(steps=[good, *nonsense], prepared=Prepared(entries=77, fingerprint="?")))
    ((mine,),) = [message.workers for message in collector.take()]
    assert (list(mine.steps), mine.dropped_steps, mine.prepared) == ([good], len(nonsense), Prepared(entries=77))


@pytest.mark.parametrize(
    "nonsense",
    [
        Prepared(refused={"of nobody": "no"}),
        Prepared(strategy="of nobody"),
        Prepared(refused={"zen": "no" * 300}),
        Prepared(gradient_density=float("nan")),
    ],
)
def test_facts_of_a_script_that_make_no_sense_are_dropped(nonsense: Prepared) -> None:
    collector = Collector()
    prepared = Prepared(entries=77, tensors=2)
    prepared.MergeFrom(nonsense)
    collector.add(KEY, WorkerTelemetry(prepared=prepared))
    ((mine,),) = [message.workers for message in collector.take()]
    assert mine.prepared == Prepared(entries=77)


def test_steps_that_could_not_be_sent_are_told_as_dropped_with_the_next_message() -> None:
    collector = Collector()
    collector.add(KEY, WorkerTelemetry(steps=[StepSample(step=n) for n in range(7)], prepared=Prepared(entries=5)))
    (lost,) = collector.take()
    collector.lost(lost)
    ((mine,),) = [message.workers for message in collector.take()]
    assert (len(mine.steps), mine.dropped_steps, mine.prepared.entries) == (0, 7, 5)
    assert list(collector.take()) == []


def test_last_words_of_a_forgotten_worker_are_still_told() -> None:
    collector = Collector()
    collector.add(KEY, WorkerTelemetry(checkpoint_step=8))
    collector.forget(KEY)
    assert [message.workers[0].checkpoint_step for message in collector.take()] == [8]
    collector.add(KEY, WorkerTelemetry(steps=[StepSample(step=1)]))
    assert [message.workers[0].checkpoint_step for message in collector.take()] == [0], "it began anew"


def test_telemetry_of_many_workers_is_split_into_messages() -> None:
    collector = Collector()
    for rank in range(64):
        notices = [Notice(text="x" * 4096)] * 16
        collector.add(WorkerKey("job-1", 1, rank), WorkerTelemetry(notices=notices))
    messages = list(collector.take())
    assert sorted(worker.id.rank for message in messages for worker in message.workers) == list(range(64))
    assert len(messages) > 1
    assert all(message.ByteSize() < 2 * 1024 * 1024 for message in messages)


async def test_long_state_directory_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    opened = WorkerSocket(deep, Collector(), lambda _: None, lambda *_: None, lambda _: None, on_passage=_none)
    folder = Path(opened.endpoint.removeprefix("ipc://")).parent
    assert len(opened.endpoint) < 100
    assert folder.stat().st_mode & 0o077 == 0
    opened.close()
    assert not folder.exists()
