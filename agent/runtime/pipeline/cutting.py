"""Cuts the model into stages: where the script says so, else by what its layers cost on the pipelines' devices."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any, Final

import torch

from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.layers import Layers
from atoll.agent.runtime.pipeline.measuring import LayerCost, measured
from atoll.agent.runtime.session.session import Session
from atoll.errors import BadInput, NoFeasiblePlan
from atoll.host.memory_limits import available_bytes
from atoll.planning.stage_cut import StageDevice, StageLayer, StageLink, StagesInput, plan_stages
from atoll.v1.common_pb2 import LEVEL_INFO

ALONE_TIMES: Final = 6
"""Memory of a parameter in a single pipeline, as a multiple of its bytes: itself, its gradient, four moments (of
Adam)."""
BESIDE_OTHERS_TIMES: Final = 14
"""Memory of a parameter with several pipelines: also the round's copy and its moments, their averages, and the
stashed weight."""
FREE_LINK: Final = StageLink(bandwidth=1e15, latency=0.0)
"""Links are not measured before training: activations cost nothing in the cut."""


def cut(
    session: Session, place: StagePlace, layers: Layers, split_at: Sequence[str] | None, example: Callable[[], Any]
) -> tuple[int, ...]:
    """The first layer of each stage, on every rank the same. Collective where there are several stages.

    split_at: names of the layers with which the stages after the first begin. example: a micro-batch of inputs, on the
    device. Raises BadInput, PeerLost."""
    if place.stages > len(layers):
        raise BadInput(
            f"{place.stages} stages need as many layers; the model has {len(layers)}. Use fewer stages, or split the "
            "model finer"
        )
    if place.stages == 1:
        return (0,)
    if split_at is not None:
        return split_by_name(layers, split_at, place.stages)
    assert session.group is not None
    costs = measured(layers, example(), session.seed, session.device, session.throttle)
    mine = {"costs": [astuple(one) for one in costs], "memory_bytes": _memory_bytes(session)}
    rows = [json.loads(one) for one in session.group.gather_bytes(json.dumps(mine).encode())]
    found = plan_stages_of(
        layers,
        place,
        [[LayerCost(*one) for one in row["costs"]] for row in rows],
        [int(row["memory_bytes"]) for row in rows],
    )
    if session.place.is_main:
        ends = [*found[1:], len(layers)]
        parts = [f"{layers.names[begin]} to {layers.names[end - 1]}" for begin, end in zip(found, ends, strict=True)]
        session.notice(LEVEL_INFO, f"{place.stages} stages, by what layers cost: {', '.join(parts)}")
    return found


def plan_stages_of(
    layers: Layers, place: StagePlace, costs: Sequence[Sequence[LayerCost]], memory_bytes: Sequence[int]
) -> tuple[int, ...]:
    """Choose the layers of each stage by every rank's measurements. All pipelines have one cut, since replicas of a
    stage are averaged. A stage's device counts as fast as the median over the pipelines, relative to the first
    stage's device. Pure. Raises BadInput."""
    reference, speeds = costs[0], []
    state_times = ALONE_TIMES if place.pipelines == 1 else BESIDE_OTHERS_TIMES
    for stage in range(place.stages):
        ratios = []
        for pipeline in range(place.pipelines):
            first = costs[pipeline * place.stages]
            here = costs[pipeline * place.stages + stage]
            ratios.append(_seconds(first) / max(_seconds(here), 1e-9))
        speeds.append(statistics.median(ratios))
    memories = [min(memory_bytes[stage :: place.stages]) for stage in range(place.stages)]
    given = StagesInput(
        layers=tuple(
            StageLayer(
                forward_s=cost.forward_s,
                backward_s=cost.backward_s,
                parameter_bytes=state_times * layers.parameter_bytes(number)
                + place.stages * (cost.kept_bytes + cost.activation_bytes),
                activation_bytes=cost.activation_bytes,
            )
            for number, cost in enumerate(reference)
        ),
        devices=tuple(
            StageDevice(speed=min(max(speed, 1e-6), 1e6), memory_bytes=memory)
            for speed, memory in zip(speeds, memories, strict=True)
        ),
        links=(FREE_LINK,) * (place.stages - 1),
    )
    try:
        return plan_stages(given).cuts
    except NoFeasiblePlan as error:
        raise BadInput(f"the model cannot be cut into {place.stages} stages: {error}") from error


def split_by_name(layers: Layers, split_at: Sequence[str], stages: int) -> tuple[int, ...]:
    unknown = [name for name in split_at if name not in layers.names]
    if unknown:
        raise BadInput(f"split_at names {unknown[0]!r}, and the model's layers are {', '.join(layers.names[:16])}")
    cuts = (0, *(layers.names.index(name) for name in split_at))
    if len(cuts) != stages or any(later <= earlier for earlier, later in pairwise(cuts)):
        raise BadInput(
            f"split_at = {list(split_at)} makes {len(cuts)} stages, and the job has {stages}. Name the first layer of "
            "each stage but the first one, in the model's order"
        )
    return cuts


def _seconds(costs: Sequence[LayerCost]) -> float:
    return sum(one.forward_s + one.backward_s for one in costs)


def _memory_bytes(session: Session) -> int:
    """Return the memory that this worker's stage may use, in bytes."""
    if session.device.type == "cuda":
        return int(torch.cuda.mem_get_info(session.device)[0])
    node = next((one.node for one in session.members if one.rank == session.place.rank), None)
    here = sum(one.node == node for one in session.members) if node is not None else 1
    return available_bytes() // max(here, 1)
