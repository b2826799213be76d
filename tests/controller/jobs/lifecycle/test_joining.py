"""Devices that join a running job, over the real ledger, reconciler and estimators, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable

from lives import TICK_S, Agent, Cluster

from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state.records import JobPhase
from atoll.controller.state.store import StateStore
from atoll.v1 import agents_pb2, common_pb2

JOB = "tiny-0001"
TOTAL = 120
STEPS_A_TICK = 3


class Training:
    """Workers of the cluster's agents train: a sample takes 1 ms over the agent's speed, a step as long as `step_s`
    says of the alive workers' compute times."""

    def __init__(self, cluster: Cluster, step_s: Callable[[list[float]], float] = max) -> None:
        self.cluster = cluster
        self.step_s = step_s
        self.speeds: dict[str, float] = {}
        self.step = 0

    def join(self, name: str, speed: float) -> None:
        self.speeds[name] = speed
        agent = self.cluster.agents.setdefault(name, Agent(name, work_per_s=1e9 * speed))
        agent.up = True

    async def tick(self) -> None:
        """A quarter of a second of training, then of the cluster."""
        workers = [(agent, key) for agent in self.cluster.agents.values() for key in agent.alive()]
        for _ in range(STEPS_A_TICK if workers else 0):
            self._step(workers)
        await self.cluster.tick()

    def _step(self, workers: list[tuple[Agent, tuple[str, int, int]]]) -> None:
        assert self.cluster.life is not None
        self.step += 1
        plans = self.state.plans
        shares = plans[-1].shares
        batches = [round(TOTAL * share / sum(shares)) for share in shares]
        if len(shares) != len(workers):  # a run that is only being started or stopped
            return
        computes = {key: 0.001 * batches[key[2]] / self.speeds[agent.name] for agent, key in workers}
        step_s = self.step_s(list(computes.values()))
        for key, compute_s in computes.items():
            sample = common_pb2.StepSample(
                step=self.step, plan=plans[-1].id, local_batch=batches[key[2]], total_batch=TOTAL, step_s=step_s,
                compute_s=compute_s, forward_s=compute_s,
            )  # fmt: skip
            worker = common_pb2.WorkerId(job=key[0], run=key[1], rank=key[2])
            self.cluster.life.progress.observe(agents_pb2.WorkerTelemetry(id=worker, steps=[sample]))

    @property
    def state(self) -> JobState:
        assert self.cluster.life is not None
        return self.cluster.life.ledger.jobs[JOB]

    def members(self) -> list[str]:
        run = self.state.run
        return sorted(member.node for member in run.members) if run else []

    async def until(self, what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
        for _ in range(int(seconds / TICK_S)):
            if condition():
                return
            await self.tick()
        raise AssertionError(f"not within {seconds} s: {what}; {self.state.job}")

    async def told(self) -> list[str]:
        assert self.cluster.life is not None
        events = await self.cluster.life.ledger.events(JOB, after=0)
        return [event.text for event in events if event.kind.startswith("DEVICE")]


async def begun(store: StateStore, training_of: Callable[[Cluster], Training], *names: str) -> Training:
    """A job of at most eight workers that trains on these devices of speed 1."""
    cluster = Cluster(store)
    training = training_of(cluster)
    for name in names:
        training.join(name, 1.0)
    await cluster.elect()
    assert cluster.life is not None
    await cluster.life.submit(workers=(1, 8))
    await training.until("run 1", lambda: training.state.job.status.phase is JobPhase.RUNNING)
    return training


async def test_a_slow_device_waits_and_a_fast_one_joins(store: StateStore) -> None:
    training = await begun(store, Training, "a", "b", "c")
    training.join("slow", 0.05)
    await training.until("a verdict", lambda: "slow/0" in training.state.job.learned.standby)
    training.join("half", 0.5)
    await training.until("run 2", lambda: training.state.job.status.run == 2)
    assert training.members() == ["a", "b", "c", "half"]
    await training.until("the trial's end", lambda: training.state.job.learned.growth is None)
    for _ in range(60):  # standbys are looked at again, and nothing comes of it
        await training.tick()
    assert (training.state.job.status.run, training.state.job.status.phase) == (2, JobPhase.RUNNING)
    assert list(training.state.job.learned.standby) == ["slow/0"]
    told = await training.told()
    assert [text.partition(":")[0] for text in told] == [
        "slow/0 waits as a standby",
        "half/0 is admitted",
        "grown from 3 to 4 workers",
    ]


async def test_a_device_that_was_predicted_to_help_and_does_not_is_sent_back_for_good(store: StateStore) -> None:
    """1. Two devices train. 2. Behind a link that nobody has measured there is a third, as fast as they are: it joins.
    3. Every step now takes a second. 4. It is sent back, and the run of two goes on and on."""
    training = await begun(
        store, lambda cluster: Training(cluster, lambda computes: 1.0 if len(computes) > 2 else max(computes)), "a", "b"
    )
    training.join("far", 1.0)
    await training.until("run 2", lambda: training.members() == ["a", "b", "far"])
    await training.until("run 3", lambda: training.state.job.status.run == 3)
    await training.until("training", lambda: training.state.job.status.phase is JobPhase.RUNNING)
    assert training.members() == ["a", "b"]
    for _ in range(100):
        await training.tick()
    assert (training.state.job.status.run, training.state.job.status.restarts) == (3, 0)
    assert training.state.job.learned.standby["far/0"].slowed == 2
    told = await training.told()
    assert told[-1] == "far/0 waits as a standby: the run was slower with it: 2000 → 120 samples/s measured"
