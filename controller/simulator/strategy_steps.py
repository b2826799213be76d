"""The seam between the simulator and a strategy: how long its steps take, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np

from atoll.controller.planners.batches.optperf import NodeModel
from atoll.controller.planners.batches.water_filling import F64
from atoll.controller.simulator.devices import Computing
from atoll.controller.simulator.links import Link
from atoll.strategies.declaration import Declared

if TYPE_CHECKING:
    from atoll.controller.simulator.cluster import Cluster
    from atoll.controller.simulator.policies import SimulatedPolicy
    from atoll.controller.simulator.scenario import Scenario

Params = Mapping[str, Any]
"""What a plan tells the strategy, by name."""
PolicyMaker: TypeAlias = "tuple[Callable[[Scenario], SimulatedPolicy], str]"
"""What makes a policy, and its description."""


def numbers(params: Params) -> dict[str, float]:
    """Those that are numbers."""
    return {name: value for name, value in params.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True)
class Timed:
    """One step. ends_s: when its slowest rank is done. step_N: from boundary to boundary. sync_N, last_sync_N: of the
    all-reduces as each rank sees them. sent_J, busy_J: bytes that left each island, and seconds they took to leave.
    exchange_N: what the exchange took of the devices beside their computing. metrics_N: what the strategy's workers
    report beside the plan's parameters, by name. told: the messages of ranks to the strategy's controller half."""

    ends_s: float
    step_N: F64
    first_bucket_N: F64
    sync_N: F64
    last_sync_N: F64
    stall_N: F64
    sent_J: F64
    busy_J: F64
    exchange_N: F64 | float = 0.0
    metrics_N: Mapping[str, F64] = field(default_factory=dict)
    told: Mapping[int, Declared] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """As it is at a moment. links: by island."""

    now_s: float
    links: Mapping[str, Link]


class StrategySteps(Protocol):
    """One for each run of a simulated job."""

    needs: ClassVar[tuple[str, ...]]
    """Tables that a scenario has to have for it, of those in scenario.NEEDS."""

    policies: ClassVar[Mapping[str, PolicyMaker]]
    """Baselines of its own, by name."""

    def __init__(self, cluster: Cluster, island_of: Sequence[str], begins_s: float) -> None:
        """island_of: by rank."""

    def step(self, computing: Computing, params: Params, network: Network, rng: np.random.Generator) -> Timed:
        """The next step. rng: of the network's noise."""
        ...

    def exact_s(self, computing: Computing, params: Params, network: Network) -> float:
        """Seconds of a step without noise, if the network stays as it is."""
        ...

    def optimum_s(self, total: int, nodes: Sequence[NodeModel], network: Network) -> float:
        """Seconds of the best split's step without noise; 0 where it is not known."""
        ...

    def extra(self, total_batch: int, params: Params) -> float | None:
        """The part of samples that it needs more; None: as the gradients' noise says, which ranks then measure."""
        ...
