"""Policies by name, and running a scenario under several of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from atoll.controller.estimators.run import RunEstimators
from atoll.controller.simulator.adaptdl import AdaptDl
from atoll.controller.simulator.cluster import Cluster
from atoll.controller.simulator.deciding import Allowed, Deciding
from atoll.controller.simulator.outcome import Outcome
from atoll.controller.simulator.policies import Even, LbBsp
from atoll.controller.simulator.run import Simulation
from atoll.controller.simulator.strategy_steps import PolicyMaker
from atoll.errors import BadInput
from atoll.host.documents import did_you_mean
from atoll.strategies import registry
from atoll.strategies.declaration import Strategy, load

POLICIES: Final[dict[str, PolicyMaker]] = {
    "even": (lambda _: Even(), "the same for every rank, for ever"),
    "lb-bsp": (lambda _: LbBsp(), "up to five samples from a slow to a fast rank at each decision (Chen et al., 2020)"),
    "adaptdl": (
        lambda _: AdaptDl(),
        "total batch with the highest goodput if all ranks were as the slowest; even split",
    ),
    "inverse-time": (lambda of: Deciding(of, Allowed(split="inverse-time")), "shares by time per sample"),
    "optperf": (
        lambda of: Deciding(of, Allowed()),
        "the fastest split of a fixed total batch, as the controller decides",
    ),
    "goodput": (lambda of: Deciding(of, Allowed(batch=True)), "split and total batch, as the controller decides"),
    "parameters": (
        lambda of: Deciding(of, Allowed(parameters=True)),
        "split, and what plans tell the strategy (sparsity, for one)",
    ),
    "parameters-batch": (
        lambda of: Deciding(of, Allowed(parameters=True, batch=True)),
        "split, total batch and what plans tell the strategy, with the least time to accuracy",
    ),
}


def simulate(cluster: Cluster, policies: Sequence[str], seed: int) -> Iterator[Outcome]:
    """One outcome for each policy, in order. Raises BadInput, or NoFeasiblePlan where the batch does not fit."""
    known = POLICIES | of_strategy(registry.find(cluster.scenario.strategy))
    for name in policies:
        if name not in known:
            raise BadInput(f"no policy {name!r}. {did_you_mean(name, known)}")
    for name in policies:
        yield Simulation(cluster, name, known[name][0](cluster.scenario), RunEstimators, seed).run()


def of_strategy(strategy: Strategy) -> dict[str, PolicyMaker]:
    """Its own baselines."""
    return dict(load(strategy.simulator).policies) if strategy.simulator else {}
