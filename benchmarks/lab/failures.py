"""Training through failures, in simulated time: the share of training time that is left.

Machines fail, checkpoints are written to memory and to a persistent tier, and a recovery restores from the best tier
that still has them. Source: Gemini (Wang et al., 2023)."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

import numpy as np

from atoll.controller.planners.checkpoint_placement.failure_domains import Machine
from atoll.controller.planners.checkpoint_placement.placement import PlacementInput, plan_placement
from atoll.errors import BadInput
from atoll.host.documents import did_you_mean
from lab.failure_scenario import FailureScenario, FailuresSection

DAY_S: Final = 86_400.0
POLICIES: Final = {
    "memory": "every step in CPU memory, and in the persistent tier every persistent.every_s (Gemini)",
    "storage-often": "persistent tier only, as often as it can be written",
    "storage-seldom": "persistent tier only, every persistent.every_s",
}
Tier = Literal["local", "peers", "persistent"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a machine, a rack, or a process. machines: those that lost their memory; none for a process."""

    at_s: float
    machines: tuple[int, ...]


def failures(rates: FailuresSection, machines: int, end_s: float, seed: int) -> Iterator[Failure]:
    """Yield the failures in order of time, until the end. The same seed gives the same failures."""
    rng = np.random.Generator(np.random.PCG64(seed))
    racks = rates.racks(machines)
    alone_s, together_s = machines * rates.machine_per_day / DAY_S, racks * rates.rack_per_day / DAY_S
    if not alone_s + together_s > 0:
        return
    now_s = 0.0
    while True:
        now_s += float(rng.exponential(1 / (alone_s + together_s)))
        if now_s >= end_s:
            return
        if rng.random() * (alone_s + together_s) < together_s:
            first = int(rng.integers(racks)) * rates.rack_machines
            yield Failure(now_s, tuple(range(first, min(first + rates.rack_machines, machines))))
        else:
            machine, hardware = int(rng.integers(machines)), rng.random() < rates.hardware
            yield Failure(now_s, (machine,) if hardware else ())


@dataclass(frozen=True, slots=True)
class Writing:
    """Checkpoints of one tier. every: steps between them. pause_s: seconds for which training stops. write_s: seconds
    after that until the checkpoint is complete, beside training; at most as long as `every` steps take."""

    every: int
    pause_s: float
    write_s: float

    @classmethod
    def at_most_every(cls, steps: int, pause_s: float, write_s: float, step_s: float) -> Writing:
        """Write as often as asked or possible: a checkpoint is complete before the next begins (Gemini, Eq. 6.2)."""
        return cls(max(steps, math.ceil(round(write_s / step_s, 9)), 1), pause_s, write_s)


@dataclass(frozen=True, slots=True)
class Restorable:
    """A step whose state can be restored, and when training had it."""

    step: int
    had_s: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Result of a stretch of training. step: the last complete one. memory, persistent: newest complete checkpoints of
    this stretch; None where there is none."""

    step: int
    memory: Restorable | None
    persistent: Restorable | None


@dataclass(frozen=True, slots=True)
class Pace:
    """Pace of training while nothing fails. memory: None where there is no such tier."""

    step_s: float
    memory: Writing | None
    persistent: Writing

    def train(self, start_s: float, start_step: int, end_s: float) -> Stretch:
        """Train from a restored step until a failure.

        Steps end at equal distances but for the pauses of the persistent tier. So the loop goes from pause to pause.
        """
        now_s, step = start_s, start_step
        in_memory = stored = None
        while True:
            until_pause = self.persistent.every - step % self.persistent.every
            done = min(int((end_s - now_s) / self.step_s), until_pause)
            in_memory = self._newest(Restorable(step, now_s), done, end_s) or in_memory
            now_s, step = now_s + done * self.step_s, step + done
            if done < until_pause:
                return Stretch(step, in_memory, stored)
            if now_s + self.persistent.pause_s + self.persistent.write_s <= end_s:
                stored = Restorable(step, now_s)
            now_s += self.persistent.pause_s
            if now_s >= end_s:
                return Stretch(step, in_memory, stored)

    def _newest(self, start: Restorable, done: int, end_s: float) -> Restorable | None:
        """Return the newest of `done` steps after the start whose checkpoint in memory is complete at the end."""
        if self.memory is None:
            return None
        complete = min(done, int((end_s - start.had_s - self.memory.write_s) / self.step_s))
        newest = (start.step + complete) // self.memory.every * self.memory.every
        if newest <= start.step:
            return None
        return Restorable(newest, start.had_s + (newest - start.step) * self.step_s)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery from a failure. lost_s: age of the restored state at the failure; retrieve_s: seconds to read it;
    pause_s: seconds from failure to training."""

    tier: Tier
    lost_s: float
    retrieve_s: float
    pause_s: float

    @property
    def wasted_s(self) -> float:
        """Seconds whose mean Gemini's Eq. 6.1 is: without detecting, replacing and restarting."""
        return self.lost_s + self.retrieve_s


@dataclass(frozen=True, slots=True)
class FailureOutcome:
    """steps: those whose work was kept. effective: their time as a share of all time. failures: some came during the
    recovery from another, and share it."""

    policy: str
    seconds: float
    steps: int
    effective: float
    failures: int
    recoveries: tuple[Recovery, ...]
    expected_wasted_s: float

    def tiers(self) -> Counter[Tier]:
        return Counter(recovery.tier for recovery in self.recoveries)


def simulate(scenario: FailureScenario, policies: Sequence[str], seed: int) -> Iterator[FailureOutcome]:
    """Yield one outcome for each policy, all with the same failures. Raises BadInput for an unknown policy."""
    for name in policies:
        if name not in POLICIES:
            raise BadInput(f"no policy {name!r} for failures. {did_you_mean(name, POLICIES)}")
    rack = scenario.failures.rack_machines
    machines = tuple(Machine(rack=str(i // rack)) if rack else Machine() for i in range(scenario.machines))
    holders = plan_placement(PlacementInput(machines=machines, replicas=scenario.replicas)).holders
    for name in policies:
        yield _Run(scenario, name, holders, seed).run()


class _Run:
    """Run of one policy. A failure during a recovery begins it anew, without the memory that it takes along."""

    def __init__(self, scenario: FailureScenario, policy: str, holders: Sequence[tuple[int, ...]], seed: int) -> None:
        self._scenario, self._policy, self._holders = scenario, policy, holders
        self._end_s = scenario.days * DAY_S
        self._failures = failures(scenario.failures, scenario.machines, self._end_s, seed)
        self._seen = 0
        stored, step_s = scenario.persistent, scenario.step_s
        every = 1 if policy == "storage-often" else round(stored.every_s / step_s)
        self._pace = Pace(
            step_s,
            Writing.at_most_every(1, 0.0, scenario.memory.write_s, step_s) if policy == "memory" else None,
            Writing.at_most_every(every, stored.pause_s, stored.write_s, step_s),
        )
        self._arrivals_s = [0.0] * scenario.recovery.standbys  # when each machine that may step in is there

    def run(self) -> FailureOutcome:
        now_s, step, stored = 0.0, 0, Restorable(0, 0.0)
        recoveries: list[Recovery] = []
        failure = self._next()
        while True:
            until_s = failure.at_s if failure else self._end_s
            stretch = self._pace.train(now_s, step, until_s)
            stored = stretch.persistent or Restorable(stored.step, max(stored.had_s, now_s))
            if failure is None:
                return self._outcome(stretch.step, recoveries)
            in_memory = stretch.memory or Restorable(step, now_s)
            tier, resumes_s, following = self._recover(failure)
            restored = stored if tier == "persistent" else in_memory
            lost_s = failure.at_s - restored.had_s
            recoveries.append(Recovery(tier, lost_s, self._retrieve_s(tier), resumes_s - failure.at_s))
            if resumes_s >= self._end_s:
                return self._outcome(restored.step, recoveries)
            now_s, step, failure = resumes_s, restored.step, following

    def _recover(self, failure: Failure) -> tuple[Tier, float, Failure | None]:
        """Return the tier that is restored from, when training resumes, and the failure after that."""
        lost: set[int] = set()
        ready_s = 0.0
        while True:
            lost.update(failure.machines)
            ready_s = max(ready_s, failure.at_s + self._scenario.recovery.detect_s, self._replaced_s(failure))
            tier = self._tier(lost)
            save_s = 0.0 if tier == "persistent" else self._scenario.memory.save_s
            resumes_s = ready_s + save_s + self._retrieve_s(tier) + self._scenario.recovery.restart_s
            following = self._next()
            if following is None or following.at_s >= resumes_s:
                return tier, resumes_s, following
            failure = following

    def _tier(self, lost: set[int]) -> Tier:
        if self._policy != "memory":
            return "persistent"
        if not lost:
            return "local"
        gone = len(lost) >= self._scenario.replicas and any(lost.issuperset(kept) for kept in self._holders)
        return "persistent" if gone else "peers"

    def _replaced_s(self, failure: Failure) -> float:
        """Order a machine for each lost one; return when the first that arrive have replaced them."""
        for _ in failure.machines:
            heapq.heappush(self._arrivals_s, failure.at_s + self._scenario.recovery.replace_s)
        return max((heapq.heappop(self._arrivals_s) for _ in failure.machines), default=0.0)

    def _retrieve_s(self, tier: Tier) -> float:
        if tier == "local":
            return 0.0
        return float(self._scenario.memory.retrieve_s if tier == "peers" else self._scenario.persistent.retrieve_s)

    def _next(self) -> Failure | None:
        found = next(self._failures, None)
        self._seen += found is not None
        return found

    def _outcome(self, steps: int, recoveries: list[Recovery]) -> FailureOutcome:
        step_s = self._pace.step_s
        return FailureOutcome(
            policy=self._policy,
            seconds=self._end_s,
            steps=steps,
            effective=steps * step_s / self._end_s,
            failures=self._seen,
            recoveries=tuple(recoveries),
            expected_wasted_s=self._expected_wasted_s(),
        )

    def _expected_wasted_s(self) -> float:
        """Return Eq. 6.1, t_ckpt + 1/(2f) + t_rtvl, of the tier that the policy mostly restores from."""
        if self._pace.memory is None:
            tier, one = "persistent", self._pace.persistent
        else:
            tier, one = "peers" if self._scenario.failures.hardware else "local", self._pace.memory
        interval_s = one.every * self._pace.step_s + one.pause_s
        return one.pause_s + one.write_s + interval_s / 2 + self._retrieve_s(cast(Tier, tier))


COLUMNS: Final = ("POLICY", "EFFECTIVE", "STEPS", "FAILURES", "LOCAL/PEERS/STORED", "PAUSE", "WASTED", "EQ. 6.1")


def rows(outcomes: Sequence[FailureOutcome]) -> list[list[str]]:
    """Return the table's rows; docs/simulator.md says what the columns mean."""
    return [
        [
            one.policy,
            f"{100 * one.effective:.2f} %",
            str(one.steps),
            str(one.failures),
            "/".join(str(one.tiers()[tier]) for tier in ("local", "peers", "persistent")),
            _seconds([recovery.pause_s for recovery in one.recoveries]),
            _seconds([recovery.wasted_s for recovery in one.recoveries]),
            _seconds([one.expected_wasted_s]),
        ]
        for one in outcomes
    ]


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f} s" if values else "-"
