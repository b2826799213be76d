"""Allocate unequal devices to a pipeline: reliable devices hold stages, and volunteers help stages.

Section 3.3 of the volunteer pipelines (ICLR 2025 submission): divisive clustering of the reliable devices, an open
travelling salesman over the clusters, servers by the delay to the neighbour stage, volunteers by the delay to a stage,
layers by power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from atoll.controller.planners.pipelines.stage_order import order_cost, shortest_order
from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import Schema, Seconds, TotalBatch

MAX_DEVICES: Final = 512
MAX_LAYERS: Final = 2_000
MAX_STAGES: Final = 64

F64 = NDArray[np.float64]
Cluster = tuple[int, ...]
"""Indices of reliable devices, ascending."""

Bandwidth = Annotated[float, Field(ge=0, le=1e15)]
Positive = Annotated[float, Field(ge=1e-9, le=1e18)]
Volume = Annotated[int, Field(ge=0, le=2**60)]


class AllocationDevice(Schema):
    """power: layer costs that the device computes in a second."""

    power: Positive
    reliable: bool


class AllocationInput(Schema):
    """delay, bandwidth: seconds and bytes a second from device i (row) to device j. A bandwidth of 0 is no link; the
    diagonal and links between two volunteers do not count. activation_bytes: of a batch, between two layers.
    layer_costs: of a sample, in order. parameter_bytes: of the whole model. batch: samples."""

    devices: Annotated[tuple[AllocationDevice, ...], Field(min_length=1, max_length=MAX_DEVICES)]
    delay: Annotated[tuple[tuple[Seconds, ...], ...], Field(max_length=MAX_DEVICES)]
    bandwidth: Annotated[tuple[tuple[Bandwidth, ...], ...], Field(max_length=MAX_DEVICES)]
    activation_bytes: Volume
    layer_costs: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    parameter_bytes: Volume
    batch: TotalBatch
    max_stages: Annotated[int, Field(ge=1, le=MAX_STAGES)] = MAX_STAGES

    @model_validator(mode="after")
    def _agrees(self) -> AllocationInput:
        for name, matrix in (("delay", self.delay), ("bandwidth", self.bandwidth)):
            if len(matrix) != len(self.devices):
                raise ValueError(
                    f"field {name} has {len(matrix)} rows, and there are {len(self.devices)} devices. Give one for each"
                )
            for place, row in enumerate(matrix):
                if len(row) != len(self.devices):
                    raise ValueError(
                        f"field {name}[{place}] has {len(row)} entries, and there are {len(self.devices)} devices. "
                        "Give one for each"
                    )
        return self


@dataclass(frozen=True, slots=True)
class AllocatedStage:
    """layers: first and last. frontal: servers that hand out activations. backward: servers that hand out gradients; a
    single reliable device is both. clients: the stage's volunteers."""

    layers: tuple[int, int]
    frontal: tuple[int, ...]
    backward: tuple[int, ...]
    clients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """stages: in the order of the pipeline. order_cost: seconds, the sum of mean edges between neighbours."""

    stages: tuple[AllocatedStage, ...]
    order_cost: float


def plan_allocation(given: AllocationInput) -> AllocationPlan:
    """Return the stages, their servers and their volunteers.

        edge(i, j) = delay_ij + delay_ji + a / bandwidth_ij + a / bandwidth_ji    a: activation bytes
        step(p stages) = max(largest mean edge between neighbours + batch |H| / (p sum C), longest aggregation)

    Clusters of reliable devices are divided as long as the step gets shorter (Eq. 2 and 3, with d = 1 and `batch` for
    what passes a stage at once). Raises NoFeasiblePlan if no device is reliable, two reliable ones have no link, or a
    volunteer reaches no stage."""
    reliable = tuple(i for i, device in enumerate(given.devices) if device.reliable)
    if not reliable:
        raise NoFeasiblePlan(f"none of {len(given.devices)} devices is reliable. Stages need one at least to hold them")
    edge_NN = _edges(given)
    _refuse_apart(edge_NN, reliable)
    clusters = _clusters(given, edge_NN, reliable)
    mean_PP = _mean_edges(edge_NN, clusters)
    order = shortest_order(mean_PP)
    stages = [clusters[i] for i in order]
    clients = _clients(given, edge_NN, stages)
    power_P = np.array([_power(given, (*stages[k], *clients[k])) for k in range(len(stages))])
    layers = layers_by_power(np.array(given.layer_costs), power_P)
    servers = [_servers(edge_NN, stages, k) for k in range(len(stages))]
    return AllocationPlan(
        tuple(AllocatedStage(layers[k], *servers[k], clients[k]) for k in range(len(stages))),
        order_cost(mean_PP, order),
    )


def stage_for(edge_P: Sequence[float], supply_P: Sequence[float] | None = None) -> int:
    """Return the stage that a volunteer helps: the one with the least mean edge, the earlier of equals.

    supply_P: samples a second that each stage has, in a run whose layers stay where they are. Then the least edge times
    supply decides. None: all have as much."""
    supplied = supply_P if supply_P is not None else [1.0] * len(edge_P)
    return min(range(len(edge_P)), key=lambda k: (edge_P[k] * supplied[k], k))


def layers_by_power(cost_L: F64, power_P: F64) -> tuple[tuple[int, int], ...]:
    """Return the first and last layer of each stage, at least one a stage.

    Minimise the slowest stage's cost / power, then the sum of cost² / power, which is nearest to proportion. Exact,
    O(stages · layers²). cost_L: float64 [L]; power_P: float64 [P], P <= L, both positive."""
    sum_L1 = np.concatenate([[0.0], np.cumsum(cost_L)])
    stage_LL = np.tril(sum_L1[:, None] - sum_L1[None, :])  # [end, begin]
    later_LL = np.tri(len(sum_L1), k=-1, dtype=bool)
    slowest_L1 = np.where(np.arange(len(sum_L1)) == 0, 0.0, np.inf)
    for power in power_P:
        slower_LL = np.maximum(slowest_L1[None, :], stage_LL / power)
        slowest_L1 = np.where(later_LL, slower_LL, np.inf).min(axis=1)
    limit = slowest_L1[-1] * (1 + 1e-12)
    spread_L1, begins = np.where(np.arange(len(sum_L1)) == 0, 0.0, np.inf), []
    for power in power_P:
        fits_LL = later_LL & (stage_LL / power <= limit)
        spread_LL = np.where(fits_LL, spread_L1[None, :] + stage_LL**2 / power, np.inf)
        begins.append(spread_LL.argmin(axis=1))
        spread_L1 = spread_LL.min(axis=1)
    cuts = [len(cost_L)]
    for begin_L1 in reversed(begins):
        cuts.append(int(begin_L1[cuts[-1]]))
    return tuple((begin, end - 1) for begin, end in pairwise(reversed(cuts)))


def _edges(given: AllocationInput) -> F64:
    """[N, N], symmetric; infinite where there is no link one way."""
    bandwidth_NN = np.array(given.bandwidth, dtype=np.float64)
    no_link_NN = np.full_like(bandwidth_NN, np.inf)
    send_NN = np.divide(given.activation_bytes, bandwidth_NN, out=no_link_NN, where=bandwidth_NN > 0)
    way_NN = np.array(given.delay, dtype=np.float64) + send_NN
    edge_NN: F64 = way_NN + way_NN.T
    np.fill_diagonal(edge_NN, 0.0)
    return edge_NN


def _refuse_apart(edge_NN: F64, reliable: Cluster) -> None:
    apart = np.argwhere(np.isinf(edge_NN[np.ix_(reliable, reliable)]))
    if len(apart):
        i, j = (reliable[place] for place in apart[0])
        raise NoFeasiblePlan(
            f"devices {i} and {j} are reliable and have no link both ways (a bandwidth of 0). Connect them, or let one "
            "be a volunteer"
        )


def _clusters(given: AllocationInput, edge_NN: F64, reliable: Cluster) -> list[Cluster]:
    clusters, step_s = [reliable], _step_s(given, edge_NN, [reliable])
    while len(clusters) < min(len(reliable), len(given.layer_costs), given.max_stages):
        divided = _divided(given, edge_NN, clusters)
        after_s = _step_s(given, edge_NN, divided)
        if after_s >= step_s:
            break
        clusters, step_s = divided, after_s
    return sorted(clusters)


def _step_s(given: AllocationInput, edge_NN: F64, clusters: list[Cluster]) -> float:
    mean_PP = _mean_edges(edge_NN, clusters)
    between_s = max((mean_PP[i, j] for i, j in pairwise(shortest_order(mean_PP))), default=0.0)
    power = sum(_power(given, one) for one in clusters)
    compute_s = given.batch * sum(given.layer_costs) / (len(clusters) * power)
    return float(max(between_s + compute_s, *(_aggregation_s(given, one, len(clusters)) for one in clusters)))


def _aggregation_s(given: AllocationInput, cluster: Cluster, stages: int) -> float:
    """Return the seconds of a stage's delayed update, which runs beside the next step.

    Each member sends the others their shard of its gradient and gets their shard of the update: 2 (n - 1) / n of the
    stage over the slowest link."""
    others = len(cluster) - 1
    if not others:
        return 0.0
    slowest = min(given.bandwidth[i][j] for i in cluster for j in cluster if i != j)
    return 2 * others / len(cluster) * given.parameter_bytes / stages / slowest


def _divided(given: AllocationInput, edge_NN: F64, clusters: list[Cluster]) -> list[Cluster]:
    """Divide the cluster of the largest diameter in two, the more powerful of equals."""
    wide = max(
        (one for one in clusters if len(one) > 1),
        key=lambda one: (float(edge_NN[np.ix_(one, one)].max()), _power(given, one), [-i for i in one]),
    )
    return [*(one for one in clusters if one != wide), *_halves(given, edge_NN, wide)]


def _halves(given: AllocationInput, edge_NN: F64, cluster: Cluster) -> tuple[Cluster, Cluster]:
    """Divide a cluster between the two devices that are farthest apart. Each of the others joins the half that is
    nearer in the mean, the clearest case first; at equal distance it joins the half with less power."""
    inner = edge_NN[np.ix_(cluster, cluster)]
    seeds = np.unravel_index(int(inner.argmax()), inner.shape)
    halves = ([cluster[int(seeds[0])]], [cluster[int(seeds[1])]])
    left = [i for i in cluster if i not in (halves[0][0], halves[1][0])]
    while left:
        near = {i: [float(edge_NN[i, half].mean()) for half in halves] for i in left}
        chosen = max(left, key=lambda i: (abs(near[i][0] - near[i][1]), -i))
        closer = near[chosen][1] < near[chosen][0]
        if abs(near[chosen][0] - near[chosen][1]) <= 1e-9 * max(near[chosen]):
            closer = _power(given, tuple(halves[1])) < _power(given, tuple(halves[0]))
        halves[closer].append(chosen)
        left.remove(chosen)
    return tuple(sorted(halves[0])), tuple(sorted(halves[1]))


def _mean_edges(edge_NN: F64, clusters: list[Cluster]) -> F64:
    mean_PP = np.zeros((len(clusters), len(clusters)))
    for i, one in enumerate(clusters):
        for j in range(i):
            mean_PP[i, j] = mean_PP[j, i] = edge_NN[np.ix_(one, clusters[j])].mean()
    return mean_PP


def _clients(given: AllocationInput, edge_NN: F64, stages: list[Cluster]) -> list[tuple[int, ...]]:
    """Assign each volunteer to the stage with the least mean edge to its reliable devices, the earlier of equals."""
    clients: list[list[int]] = [[] for _ in stages]
    for i, device in enumerate(given.devices):
        if device.reliable:
            continue
        mean_P = [float(edge_NN[i, list(stage)].mean()) for stage in stages]
        nearest = stage_for(mean_P)
        if not np.isfinite(mean_P[nearest]):
            raise NoFeasiblePlan(
                f"device {i}, a volunteer, has links to all servers of no stage. Leave it out, or give its bandwidths"
            )
        clients[nearest].append(i)
    return [tuple(one) for one in clients]


def _servers(edge_NN: F64, stages: list[Cluster], stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (frontal, backward). A device serves the neighbour stage that is nearer to it in the mean. At the ends of
    the pipeline, with one neighbour, the nearer half serves it; with none, the first are frontal."""
    members = stages[stage]
    if len(members) == 1:
        return members, members
    before = edge_NN[np.ix_(members, stages[stage - 1])].mean(axis=1) if stage else None
    after = edge_NN[np.ix_(members, stages[stage + 1])].mean(axis=1) if stage + 1 < len(stages) else None
    if before is not None and after is not None:
        leaning = before - after
        leaning_front = int((leaning <= 0).sum())
    elif before is not None:
        leaning, leaning_front = before, -(-len(members) // 2)
    else:
        leaning = -after if after is not None else np.arange(len(members), dtype=np.float64)
        leaning_front = len(members) // 2
    front = min(max(leaning_front, 1), len(members) - 1)
    by_leaning = [members[int(k)] for k in np.argsort(leaning, kind="stable")]
    return tuple(sorted(by_leaning[:front])), tuple(sorted(by_leaning[front:]))


def _power(given: AllocationInput, members: tuple[int, ...]) -> float:
    return sum(given.devices[i].power for i in members)
