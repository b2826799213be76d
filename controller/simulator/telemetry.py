"""The telemetry of simulated ranks: what they measure, told as agents do, rank by rank, now and then."""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.controller.estimators.observed import ObservedLink
from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.run import RunEstimators
from atoll.controller.simulator.devices import Computing
from atoll.controller.simulator.learning import SampledNorms
from atoll.controller.simulator.outcome import PlanLog
from atoll.controller.simulator.ranks import Ranks
from atoll.controller.simulator.strategy_steps import Timed, numbers
from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.declaration import Declared

_LOAD_SHARE: Final = 0.1
_UPDATE_SHARE: Final = 0.1
"""Of what a step computes before its backward pass, as Eq. 1 of Cannikin (2024) counts it; the rest is forward."""


class Telemetry:
    """Of one run."""

    def __init__(self, estimators: RunEstimators, ranks: Ranks, entries: int) -> None:
        self._estimators, self._ranks = estimators, ranks
        self._island_of = dict(enumerate(ranks.island_of))
        self._steps: list[list[ObservedStep]] = [[] for _ in ranks.devices]
        self._sent_J, self._busy_J = np.zeros(len(ranks.islands)), np.zeros(len(ranks.islands))
        self._messages: dict[int, Declared] = {}  # the newest of each rank
        estimators.observe_entries(entries)

    def measure(self, step: int, plan: PlanLog, computing: Computing, timed: Timed, norms: SampledNorms) -> None:
        self._sent_J += timed.sent_J
        self._busy_J += timed.busy_J
        self._messages |= timed.told
        columns = (
            timed.step_N,
            computing.before_N + timed.exchange_N,
            computing.backward_N,
            timed.first_bucket_N,
            timed.sync_N,
            timed.last_sync_N,
            timed.stall_N,
            norms.local_N,
        )
        batches = plan.choice.batches
        rows = zip(self._steps, batches, *(column.tolist() for column in columns), strict=True)
        for rank, row in enumerate(rows):
            steps, batch, step_s, before_s, backward_s, first_s, sync_s, last_s, stall_s, sqnorm = row
            metrics = {name: float(told_N[rank]) for name, told_N in timed.metrics_N.items()}
            steps.append(
                ObservedStep(
                    step=step,
                    plan=plan.plan,
                    local_batch=batch,
                    total_batch=sum(batches),
                    step_s=step_s,
                    compute_s=before_s + backward_s,
                    load_s=_LOAD_SHARE * before_s,
                    forward_s=(1 - _LOAD_SHARE - _UPDATE_SHARE) * before_s,
                    backward_s=backward_s,
                    first_bucket_s=first_s,
                    update_s=_UPDATE_SHARE * before_s,
                    sync_s=sync_s,
                    last_sync_s=last_s,
                    strategy_metrics={**numbers(plan.choice.params), **metrics, "stall_s": stall_s},
                    local_sqnorm=sqnorm,
                    global_sqnorm=norms.together,
                    halves=norms.halves,
                )
            )

    def tell(self, now_s: float) -> Profile:
        """Everything since the last time; what is known then."""
        for rank, steps in enumerate(self._steps):
            for step in steps:
                self._estimators.observe(rank, step)
            steps.clear()
        for rank, told in self._messages.items():
            self._estimators.hear(rank, told)
        self._messages.clear()
        others = len(self._ranks.leaders) - 1
        sent = zip(self._ranks.leaders, self._sent_J.tolist(), self._busy_J.tolist(), strict=True)
        for leader, sent_bytes, busy_s in sent:
            peers = [peer for peer in self._ranks.leaders if peer != leader] if sent_bytes else []
            links = [ObservedLink(peer=peer, sent_bytes=round(sent_bytes / others), busy_s=busy_s) for peer in peers]
            if links:
                self._estimators.observe_links(leader, self._island_of, links, now_s)
        return self._estimators.profile()
