"""Training through failures, in simulated time: what is lost, from which tier it comes back, what that leaves."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from atoll.controller.planners.checkpoint_placement.failure_domains import Machine
from atoll.controller.planners.checkpoint_placement.placement import PlacementInput, plan_placement
from atoll.controller.simulator.failure_scenario import FailureScenario
from atoll.controller.simulator.failures import DAY_S, Failure, failures
from atoll.controller.simulator.progress import Pace, Restorable, Writing
from atoll.errors import BadInput
from atoll.host.documents import did_you_mean

Tier = Literal["local", "peers", "persistent"]
POLICIES: Final = {
    "memory": "every step in CPU memory, and in the persistent tier every persistent.every_s (Gemini)",
    "storage-often": "persistent tier only, as often as it can be written",
    "storage-seldom": "persistent tier only, every persistent.every_s",
}


@dataclass(frozen=True, slots=True)
class Recovery:
    """From a failure until training goes on. lost_s: from when training had the restored state until it failed;
    retrieve_s: reading it; pause_s: failure to training."""

    tier: Tier
    lost_s: float
    retrieve_s: float
    pause_s: float

    @property
    def wasted_s(self) -> float:
        """What Gemini (Wang et al., 2023), Eq. 6.1, is the mean of: without detecting, replacing and restarting."""
        return self.lost_s + self.retrieve_s


@dataclass(frozen=True, slots=True)
class Survived:
    """steps: whose work was kept. effective: their time as a part of all time. failures: some may have come while
    another was being recovered from, and share its recovery."""

    policy: str
    seconds: float
    steps: int
    effective: float
    failures: int
    recoveries: tuple[Recovery, ...]
    expected_wasted_s: float

    def tiers(self) -> Counter[Tier]:
        return Counter(recovery.tier for recovery in self.recoveries)


def survive(scenario: FailureScenario, policies: Sequence[str], seed: int) -> Iterator[Survived]:
    """One outcome for each policy, all with the same failures. Raises BadInput for a policy that there is not."""
    for name in policies:
        if name not in POLICIES:
            raise BadInput(f"no policy {name!r} for failures. {did_you_mean(name, POLICIES)}")
    rack = scenario.failures.rack_machines
    machines = tuple(Machine(rack=str(i // rack)) if rack else Machine() for i in range(scenario.machines))
    holders = plan_placement(PlacementInput(machines=machines, replicas=scenario.replicas)).holders
    for name in policies:
        yield _Run(scenario, name, holders, seed).run()


class _Run:
    """One policy. A failure during a recovery begins it anew, without whatever memory it takes along."""

    def __init__(self, scenario: FailureScenario, policy: str, holders: Sequence[tuple[int, ...]], seed: int) -> None:
        self._scenario, self._policy, self._holders = scenario, policy, holders
        self._end_s = scenario.days * DAY_S
        self._failures = failures(scenario.rates(), scenario.machines, self._end_s, seed)
        self._seen = 0
        stored, step_s = scenario.persistent, scenario.step_s
        apart = 1 if policy == "storage-often" else round(stored.every_s / step_s)
        self._pace = Pace(
            step_s,
            Writing.at_most_every(1, 0.0, scenario.memory.write_s, step_s) if policy == "memory" else None,
            Writing.at_most_every(apart, stored.pause_s, stored.write_s, step_s),
        )
        self._arrivals_s = [0.0] * scenario.recovery.standbys  # when each machine that may step in is there

    def run(self) -> Survived:
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
            tier, goes_on_s, following = self._recover(failure)
            restored = stored if tier == "persistent" else in_memory
            lost_s = failure.at_s - restored.had_s
            recoveries.append(Recovery(tier, lost_s, self._retrieve_s(tier), goes_on_s - failure.at_s))
            if goes_on_s >= self._end_s:
                return self._outcome(restored.step, recoveries)
            now_s, step, failure = goes_on_s, restored.step, following

    def _recover(self, failure: Failure) -> tuple[Tier, float, Failure | None]:
        """The tier that serves, when training goes on, and the failure after that."""
        lost: set[int] = set()
        ready_s = 0.0
        while True:
            lost.update(failure.machines)
            ready_s = max(ready_s, failure.at_s + self._scenario.recovery.detect_s, self._replaced_s(failure))
            tier = self._tier(lost)
            save_s = 0.0 if tier == "persistent" else self._scenario.memory.save_s
            goes_on_s = ready_s + save_s + self._retrieve_s(tier) + self._scenario.recovery.restart_s
            following = self._next()
            if following is None or following.at_s >= goes_on_s:
                return tier, goes_on_s, following
            failure = following

    def _tier(self, lost: set[int]) -> Tier:
        if self._policy != "memory":
            return "persistent"
        if not lost:
            return "local"
        gone = len(lost) >= self._scenario.replicas and any(lost.issuperset(kept) for kept in self._holders)
        return "persistent" if gone else "peers"

    def _replaced_s(self, failure: Failure) -> float:
        """Every machine that is lost is ordered anew; the first that are there step in."""
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

    def _outcome(self, steps: int, recoveries: list[Recovery]) -> Survived:
        step_s = self._pace.step_s
        return Survived(
            policy=self._policy,
            seconds=self._end_s,
            steps=steps,
            effective=steps * step_s / self._end_s,
            failures=self._seen,
            recoveries=tuple(recoveries),
            expected_wasted_s=self._expected_wasted_s(),
        )

    def _expected_wasted_s(self) -> float:
        """Eq. 6.1, t_ckpt + 1/(2f) + t_rtvl, of the tier that the policy recovers from as a rule."""
        if self._pace.memory is None:
            tier, one = "persistent", self._pace.persistent
        else:
            tier, one = "peers" if self._scenario.failures.hardware else "local", self._pace.memory
        apart_s = one.every * self._pace.step_s + one.pause_s
        return one.pause_s + one.write_s + apart_s / 2 + self._retrieve_s(cast(Tier, tier))
