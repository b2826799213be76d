"""Simulated steps of strategy `compressed`: the timeline by which its groups are planned.

Legend of suffixes: N = ranks, T = tensors, J = islands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final

import numpy as np

from atoll.controller.planners.batches.water_filling import F64
from atoll.controller.planners.tensor_compression.compression import CompressionInput, Option, TensorTimes
from atoll.controller.planners.tensor_compression.tensor_groups import grouping_time
from atoll.controller.simulator.cluster import BYTES_PER_MBIT, Cluster
from atoll.controller.simulator.policies import SimulatedPolicy, never
from atoll.controller.simulator.scenario import Scenario
from atoll.controller.simulator.steps import Computing, Network, Params, StrategySteps, Timed
from atoll.errors import BadInput
from atoll.strategies.compressed.costs.compression_costs import costs_of
from atoll.strategies.compressed.costs.measured import (
    KEPT,
    LINK_EVERY_ROUNDS,
    PROBE_BYTES,
    REPEATS,
    TELL_EVERY_ROUNDS,
    MeasuredCosts,
)
from atoll.strategies.compressed.groups.options import RULES, TensorGroup, by_size
from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.compressed.settings import Compressed

WHOLE_ALGORITHMS: Final = frozenset({"power"})
"""Algorithms that compress no parts of a tensor."""


def _groups_by_rule(min_bytes: int, scenario: Scenario) -> Params:
    assert scenario.compression is not None  # the scenario was checked
    return CompressedPlan.of(by_size(scenario.compression.bytes_of_each, min_bytes)).said()


class CompressedSteps(StrategySteps):
    """Steps by the planner's own timeline.

    Ranks measure links when a run begins and every LINK_EVERY_ROUNDS steps, which takes time. They report what they
    know every TELL_EVERY_ROUNDS, as workers do."""

    needs: ClassVar = ("compression",)
    policies: ClassVar = {
        name: SimulatedPolicy(what=what, decide=never, even=True, first_params=partial(_groups_by_rule, min_bytes))
        for name, (min_bytes, what) in RULES.items()
    }

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        super().__init__(cluster, island_of, begins_s)
        compression, settings = cluster.scenario.compression, cluster.scenario.strategy_settings
        assert compression is not None  # the scenario was checked
        assert isinstance(settings, Compressed)
        self._compression, self._algorithm = compression, settings.algorithm
        self._workers = self._circle()
        self._bytes = compression.bytes_of_each
        shares = np.array(compression.backward_of_each, dtype=np.float64)
        self._share_T: F64 = shares / shares.sum()
        self._first_groups = by_size(self._bytes, settings.min_bytes)
        self._rounds = 0
        self._known_mbit_s = 0.0
        self._newest: deque[tuple[float, Computing]] = deque(maxlen=KEPT)  # seconds of steps, and of computing

    def step(self, computing: Computing, params: Params, network: Network, rng: np.random.Generator) -> Timed:
        groups, mbit_s, probed_s = self._groups(params), self._mbit_s(network), 0.0
        if self._rounds % LINK_EVERY_ROUNDS == 0:
            self._known_mbit_s = mbit_s
            probed_s = 2 * REPEATS * PROBE_BYTES / (mbit_s * BYTES_PER_MBIT) if self._rounds else 0.0
        self._rounds += 1
        step_s = self._iterated_s(computing, groups, mbit_s)
        self._newest.append((step_s, computing))
        messages = self._messages(len(groups)) if self._rounds % TELL_EVERY_ROUNDS == 0 else {}
        first_N = computing.backward_N * float(self._share_T[: groups[0].end].sum())
        return Timed(
            ends_s=network.now_s + step_s + probed_s,
            step_N=np.full(self._ranks, step_s + probed_s),
            first_bucket_N=first_N,
            sync_N=np.maximum(step_s - computing.before_N - first_N, 0.0),
            stall_N=np.maximum(step_s - computing.all_N, 0.0),
            messages=messages,
        )

    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        return self._iterated_s(computing, self._groups(params), self._mbit_s(network))

    def _groups(self, params: Params) -> list[TensorGroup]:
        """Raises BadInput."""
        groups = CompressedPlan.model_validate(dict(params)).as_groups() or self._first_groups
        if groups[-1].end != len(self._bytes):
            raise BadInput(f"a plan groups {groups[-1].end} tensors, and the scenario has {len(self._bytes)}")
        return groups

    def _iterated_s(self, computing: Computing, groups: Sequence[TensorGroup], mbit_s: float) -> float:
        """Return the timeline's seconds; a gradient is there once the last rank has it."""
        forward_s = float(computing.before_N.max())
        ready_NT = computing.before_N[:, None] + computing.backward_N[:, None] * np.cumsum(self._share_T)
        backward_T = np.diff(ready_NT.max(axis=0), prepend=forward_s)
        tensors = tuple(
            TensorTimes.model_construct(bytes=size, backward_s=max(float(seconds), 0.0))
            for size, seconds in zip(self._bytes, backward_T, strict=True)
        )
        given = CompressionInput.model_construct(forward_s=forward_s, tensors=tensors, options=self._options(mbit_s))
        return grouping_time(given, [one.end - one.begin for one in groups], [one.way.name for one in groups])

    def _options(self, mbit_s: float) -> tuple[Option, ...]:
        """Return the ways to synchronise a group over a link of this rate."""
        costs = costs_of({0: self._measured([[1, 1, 0]], mbit_s)}, 1)
        assert costs is not None  # of every rank
        return costs.given.options

    def _messages(self, groups: int) -> dict[int, MeasuredCosts]:
        """Return the message of each rank."""
        shares, steps_s = self._share_T.tolist(), [step_s for step_s, _ in self._newest]
        before_N = np.median([computing.before_N for _, computing in self._newest], axis=0)
        backward_N = np.median([computing.backward_N for _, computing in self._newest], axis=0)
        ranks = zip(before_N.tolist(), backward_N.tolist(), strict=True)
        return {
            rank: self._measured(
                [[1, size, round(1e6 * part * backward_s)] for size, part in zip(self._bytes, shares, strict=True)],
                self._known_mbit_s,
                rest_s=before_s,
                iteration_s=float(np.median(steps_s)),
                groups=groups,
            )
            for rank, (before_s, backward_s) in enumerate(ranks)
        }

    def _measured(
        self,
        tensors: list[list[int]],
        mbit_s: float,
        *,
        rest_s: float = 0.0,
        iteration_s: float = 0.0,
        groups: int = 1,
    ) -> MeasuredCosts:
        given, n, byte_s = self._compression, self._workers, 1 / (mbit_s * BYTES_PER_MBIT)
        latency_s = float(given.latency_s)
        return MeasuredCosts(
            tensors=tensors,
            rest_s=rest_s,
            iteration_s=iteration_s,
            groups=groups,
            workers=n,
            algorithm=self._algorithm,
            divisible=self._algorithm not in WHOLE_ALGORITHMS,
            ratio=float(given.ratio),
            link=[latency_s, byte_s],
            allreduce=[2 * (n - 1) * latency_s, 2 * (n - 1) / n * byte_s],
            compress_device=_cost(given.compress),
            compress_cpu=_cost(given.compress_cpu or given.compress),
            decompress_device=_cost(given.decompress),
            decompress_cpu=_cost(given.decompress_cpu or given.decompress),
        )


def _cost(said: tuple[float, float]) -> list[float]:
    return [float(one) for one in said]
