"""Policies by name, and running a scenario under several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from atoll.controller.estimators.run import RunEstimators
from atoll.controller.simulator.adaptdl import AdaptDl
from atoll.controller.simulator.cluster import Cluster
from atoll.controller.simulator.deciding import Allowed, Deciding
from atoll.controller.simulator.outcome import Outcome
from atoll.controller.simulator.policies import Even, LbBsp, Policy
from atoll.controller.simulator.run import Simulation
from atoll.controller.simulator.telemetry import Estimators
from atoll.documents import did_you_mean
from atoll.errors import BadInput

POLICIES: Final[Mapping[str, tuple[Callable[[], Policy], str]]] = {
    "even": (Even, "the same for every rank, for ever"),
    "lb-bsp": (LbBsp, "up to five samples from a slow to a fast rank at each decision (Chen et al., 2020)"),
    "adaptdl": (AdaptDl, "total batch with the highest goodput if all ranks were as the slowest; even split"),
    "inverse-time": (lambda: Deciding(Allowed(split="inverse-time")), "shares by time per sample"),
    "optperf": (lambda: Deciding(Allowed()), "the fastest split of a fixed total batch, as the controller decides"),
    "goodput": (lambda: Deciding(Allowed(batch=True)), "split and total batch, as the controller decides"),
    "rate": (lambda: Deciding(Allowed(rate=True)), "stale-sparse: split and compression rate"),
    "rate-batch": (
        lambda: Deciding(Allowed(rate=True, batch=True)),
        "stale-sparse: split, rate and total batch, with the least time to accuracy",
    ),
}


def simulate(
    cluster: Cluster,
    policies: Sequence[str],
    seed: int,
    new_estimators: Callable[[], Estimators] = RunEstimators,
) -> Iterator[Outcome]:
    """One outcome for each policy, in order. Raises BadInput, or NoFeasiblePlan where the batch does not fit."""
    for name in policies:
        if name not in POLICIES:
            raise BadInput(f"no policy {name!r}. {did_you_mean(name, POLICIES)}")
    for name in policies:
        yield Simulation(cluster, name, POLICIES[name][0](), new_estimators, seed).run()
