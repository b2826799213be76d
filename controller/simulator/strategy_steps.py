"""The seam between the simulator and a strategy: how long its steps take, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from atoll.controller.planners.optperf import NodeModel
from atoll.controller.planners.water_filling import F64
from atoll.controller.simulator.devices import Computing
from atoll.controller.simulator.links import Link

if TYPE_CHECKING:
    from atoll.controller.simulator.cluster import Cluster

Params = Mapping[str, Any]
"""What a plan tells the strategy, by name."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One step. ends_s: when its slowest rank is done. step_N: from boundary to boundary. sync_N, last_sync_N: of the
    all-reduces as each rank sees them. sent_J, busy_J: bytes that left each island, and seconds they took to leave.
    exchange_N: what the exchange took of the devices beside their computing. metrics_N: what the strategy's workers
    report beside the plan's parameters, by name."""

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


@dataclass(frozen=True, slots=True)
class Network:
    """As it is at a moment. links: by island."""

    now_s: float
    links: Mapping[str, Link]


class StrategySteps(Protocol):
    """One for each run of a simulated job."""

    needs_extra: ClassVar[bool]
    """Whether a scenario has to say with [learning.extra] what a sample is worth."""

    needs_sparse: ClassVar[bool]
    """Whether a scenario has to say with [sparse] which gradients are."""

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
