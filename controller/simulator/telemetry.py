"""Telemetry of simulated ranks: their measurements reach the estimators now and then, rank by rank, as agents' do."""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.controller.estimators.bandwidth import ObservedLink
from atoll.controller.estimators.profile import Profile
from atoll.controller.estimators.run import RunEstimators
from atoll.controller.planners.batches.water_filling import F64
from atoll.controller.simulator.learning import SampledNorms
from atoll.controller.simulator.report import PlanLog, numbers
from atoll.controller.simulator.steps import Computing, Ranks, Timed
from atoll.step_estimators.observed import ObservedStep
from atoll.strategies.declaration import Declared

LOAD_SHARE: Final = 0.1
UPDATE_SHARE: Final = 0.1
"""Shares of a step's computing before its backward pass (Cannikin, 2024, Eq. 1); the rest is the forward pass."""


class Telemetry:
    """Telemetry of one run."""

    def __init__(self, estimators: RunEstimators, ranks: Ranks, entries: int) -> None:
        self._estimators, self._ranks = estimators, ranks
        self._island_of = dict(enumerate(ranks.island_of))
        self._steps: list[list[ObservedStep]] = [[] for _ in ranks.devices]
        self._sent_J, self._busy_J = np.zeros(len(ranks.islands)), np.zeros(len(ranks.islands))
        self._messages: dict[int, Declared] = {}  # the newest of each rank
        estimators.observe_entries(entries)

    def measure(self, step: int, plan: PlanLog, computing: Computing, timed: Timed, norms: SampledNorms) -> None:
        """Take one step of all ranks."""
        self._sent_J += timed.sent_J
        self._busy_J += timed.busy_J
        self._messages |= timed.messages
        columns = (
            timed.step_N,
            computing.before_N + timed.exchange_N,
            computing.backward_N,
            timed.first_bucket_N,
            timed.sync_N,
            timed.last_sync_N,
            timed.stall_N,
            timed.exchange_N,
            norms.local_N,
        )
        params, total = numbers(plan.record.strategy_params), sum(plan.batches)
        rows = zip(self._steps, plan.batches, *(_each(column, len(self._steps)) for column in columns), strict=True)
        for row in rows:
            steps, batch, step_s, before_s, backward_s, first_s, sync_s, last_s, stall_s, apply_s, sqnorm = row
            steps.append(
                ObservedStep(
                    step=step,
                    plan=plan.record.id,
                    local_batch=batch,
                    total_batch=total,
                    step_s=step_s,
                    compute_s=before_s + backward_s,
                    load_s=LOAD_SHARE * before_s,
                    forward_s=(1 - LOAD_SHARE - UPDATE_SHARE) * before_s,
                    backward_s=backward_s,
                    first_bucket_s=first_s,
                    update_s=UPDATE_SHARE * before_s,
                    sync_s=sync_s,
                    last_sync_s=last_s,
                    strategy_metrics={**params, "apply_s": apply_s, "stall_s": stall_s},
                    local_grad_sqnorm=sqnorm,
                    global_grad_sqnorm=norms.together,
                    halves=norms.halves,
                )
            )

    def deliver(self, now_s: float) -> Profile:
        """Give the estimators everything since the last call; return what they know then."""
        for rank, steps in enumerate(self._steps):
            for step in steps:
                self._estimators.observe(rank, step)
            steps.clear()
        for rank, message in self._messages.items():
            self._estimators.on_message(rank, message)
        self._messages.clear()
        leaders = self._ranks.leaders
        for leader, sent_bytes, busy_s in zip(leaders, self._sent_J.tolist(), self._busy_J.tolist(), strict=True):
            share = round(sent_bytes / max(len(leaders) - 1, 1))
            peers = [peer for peer in leaders if peer != leader] if sent_bytes else []
            links = [ObservedLink(peer=peer, sent_bytes=share, busy_s=busy_s) for peer in peers]
            if links:
                self._estimators.observe_links(leader, self._island_of, links, now_s)
        return self._estimators.profile()


def _each(column: F64 | float, ranks: int) -> list[float]:
    found: list[float] = np.broadcast_to(column, ranks).tolist()
    return found
