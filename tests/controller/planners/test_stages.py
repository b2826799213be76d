from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput, NoFeasiblePlan
from atoll.planning.stage_cut import StageDevice, StageLayer, StageLink, StagesInput, plan_stages

layers = st.builds(
    StageLayer,
    forward_s=st.floats(0, 5),
    backward_s=st.floats(0, 5),
    parameter_bytes=st.integers(0, 10),
    activation_bytes=st.integers(0, 40),
)
devices = st.builds(StageDevice, speed=st.floats(0.1, 4), memory_bytes=st.integers(0, 40))
links = st.builds(StageLink, bandwidth=st.floats(1, 20), latency=st.floats(0, 2))


@st.composite
def pipelines(draw: st.DrawFn) -> StagesInput:
    on = draw(st.lists(devices, min_size=1, max_size=4))
    joined = draw(st.lists(links, min_size=len(on) - 1, max_size=len(on) - 1))
    return StagesInput(
        layers=tuple(draw(st.lists(layers, min_size=1, max_size=8))), devices=tuple(on), links=tuple(joined)
    )


def bottleneck_s(case: StagesInput, cuts: tuple[int, ...]) -> float:
    """Infinity where a stage does not fit its device's memory."""
    worst = 0.0
    for i, (begin, end) in enumerate(itertools.pairwise((*cuts, len(case.layers)))):
        stage, device = case.layers[begin:end], case.devices[i]
        if sum(layer.parameter_bytes for layer in stage) > device.memory_bytes:
            return math.inf
        worst = max(worst, sum(layer.forward_s + layer.backward_s for layer in stage) / device.speed)
        if i < len(case.links):
            worst = max(worst, 2 * (case.links[i].latency + stage[-1].activation_bytes / case.links[i].bandwidth))
    return worst


def every_cut(case: StagesInput) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in itertools.combinations(range(1, len(case.layers)), len(case.devices) - 1)]


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_no_cut_has_a_faster_bottleneck(case: StagesInput) -> None:
    best = min((bottleneck_s(case, cuts) for cuts in every_cut(case)), default=math.inf)
    if best == math.inf:
        with pytest.raises(NoFeasiblePlan):
            plan_stages(case)
        return
    plan = plan_stages(case)
    assert plan.cuts in every_cut(case)
    assert plan.bottleneck_s == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert bottleneck_s(case, plan.cuts) == pytest.approx(best, rel=1e-9, abs=1e-9)


def even_layers(count: int) -> tuple[StageLayer, ...]:
    return (StageLayer(forward_s=0.1, backward_s=0.2, parameter_bytes=1, activation_bytes=1),) * count


def on_speeds(*speeds: float, count: int) -> StagesInput:
    fast = StageLink(bandwidth=1e9, latency=0.0)
    on = tuple(StageDevice(speed=speed, memory_bytes=100) for speed in speeds)
    return StagesInput(layers=even_layers(count), devices=on, links=(fast,) * (len(speeds) - 1))


def test_layers_go_by_speed() -> None:
    """1 : 0.6 : 0.3 of 19 layers: an even cut waits for the slowest, 6 layers at 0.3."""
    case = on_speeds(1.0, 0.6, 0.3, count=19)
    plan = plan_stages(case)
    assert plan.cuts == (0, 10, 16)
    assert bottleneck_s(case, (0, 7, 13)) > 1.5 * plan.bottleneck_s


def test_more_stages_than_layers_cannot_be() -> None:
    with pytest.raises(NoFeasiblePlan, match="3 stages need as many layers; there are 2"):
        plan_stages(on_speeds(1.0, 1.0, 1.0, count=2))


def test_what_fits_no_memory_names_the_largest_layer() -> None:
    case = on_speeds(1.0, count=1)
    huge = StageLayer(forward_s=0.1, backward_s=0.1, parameter_bytes=101, activation_bytes=0)
    with pytest.raises(NoFeasiblePlan, match=r"layers keep 102 bytes, the devices have 100.*layers\[1\], keeps 101"):
        plan_stages(case.model_copy(update={"layers": (*case.layers, huge)}))


def test_links_must_join_the_devices() -> None:
    text = PLANNERS["stages"].example.replace('"links": [{"bandwidth": 12500000, "latency": 0.001}]', '"links": []')
    with pytest.raises(BadInput, match="links has 0, and there are 2 devices"):
        PLANNERS["stages"].run_json(text)
