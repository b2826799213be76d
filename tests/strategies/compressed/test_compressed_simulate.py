"""Strategy `compressed` in the simulator: steps by the planner's own timeline, and the real planner over a link that
changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.controller.simulator import cluster
from atoll.controller.simulator.cluster import Link
from atoll.controller.simulator.report import Outcome
from atoll.controller.simulator.run import simulate
from atoll.controller.simulator.scenario import Scenario, check
from atoll.controller.simulator.steps import Computing, Network
from atoll.errors import BadInput
from atoll.strategies.compressed.algorithms import compressor_of
from atoll.strategies.compressed.costs.measured import LINK_EVERY_ROUNDS, PROBE_BYTES, REPEATS, TELL_EVERY_ROUNDS
from atoll.strategies.compressed.groups.layout import TensorLayout
from atoll.strategies.compressed.groups.options import RULES, Way
from atoll.strategies.compressed.settings import WORDS, Compressed
from atoll.strategies.compressed.simulate import WHOLE_ALGORITHMS, CompressedSteps

TENSORS = [
    {"count": 2, "bytes": 4_000_000, "backward": 1},
    {"count": 10, "bytes": 1_000, "backward": 0.2},
    {"count": 4, "bytes": 500_000, "backward": 3},
]
COMPRESSION: dict[str, Any] = {"ratio": 0.02, "compress": [1e-4, 1e-9], "decompress": [1e-4, 5e-10], "tensors": TENSORS}
DEVICE = {"q": 1e-3, "s": 2e-3, "k": 2e-3, "m": 2e-3, "noise": 0.0}
COMPUTING = Computing(np.array([0.02, 0.05]), np.array([0.06, 0.04]))


def built(folder: Path = Path(), **changes: Any) -> cluster.Cluster:
    document: dict[str, Any] = {
        "strategy": "compressed",
        "compressed": {"algorithm": "dgc"},
        "total_batch": 64,
        "devices": [{**DEVICE, "island": "a"}, {**DEVICE, "island": "b"}],
        "links": {"a": {"mbit_s": 400}, "b": {"mbit_s": 100}},
        "compression": COMPRESSION,
    }
    said = {name: value for name, value in {**document, **changes}.items() if value is not None}
    return cluster.build(check(Scenario, said, "test"), folder)


def steps_of(what: cluster.Cluster) -> CompressedSteps:
    return CompressedSteps(what, ["a", "b"], 0.0)


def test_a_step_without_compression_is_computing_and_what_all_reduces_take_on_the_thinnest_link() -> None:
    """One tensor: 1 MB there and back over 100 Mbit/s, once the slower rank has it."""
    one = {**COMPRESSION, "tensors": [{"bytes": 1_000_000, "backward": 1}], "latency_s": 0.003}
    what = built(compression=one)
    params = {"ways": ["none"], "groups": [[1, 0]]}
    exact_s = steps_of(what).exact_s(COMPUTING, params, Network(0.0, what.links))
    assert exact_s == pytest.approx(0.09 + 2 * 0.003 + 1_000_000 * 8 / 100e6)
    assert what.entries == 250_000


def test_gradients_leave_when_the_last_rank_has_them() -> None:
    """Rank 0 begins its backward pass sooner and takes longer for it: each gradient waits for the later of both."""
    two = {**COMPRESSION, "tensors": [{"count": 2, "bytes": 1_000, "backward": 1}], "latency_s": 0.0}
    what = built(compression=two)
    computing = Computing(np.array([0.0, 0.05]), np.array([0.1, 0.02]))
    groups = {"ways": ["none"], "groups": [[1, 0], [1, 0]]}
    on_wire_s = 1_000 * 8 / 100e6
    exact_s = steps_of(what).exact_s(computing, groups, Network(0.0, what.links))
    assert exact_s == pytest.approx(0.1 + on_wire_s)


def test_ranks_measure_links_and_tell_what_they_know_as_workers_do() -> None:
    """1. Links are measured in the first step, and told every 20. 2. They are thin from then on: what is told stays,
    and steps take longer at once. 3. They are measured again after 100 steps, which takes time."""
    what, rng = built(), np.random.default_rng(0)
    steps, thin = steps_of(what), {name: Link.constant(10.0) for name in what.links}
    rates, seconds = [], []
    for step in range(LINK_EVERY_ROUNDS + TELL_EVERY_ROUNDS):
        network = Network(0.0, what.links if step == 0 else thin)
        timed = steps.step(COMPUTING, {}, network, rng)
        seconds.append(timed.ends_s)
        if timed.messages:
            assert sorted(timed.messages) == [0, 1]
            rates.append((step + 1, round(8e-6 / timed.messages[0].link[1])))  # type: ignore[attr-defined]
    assert rates == [(step, 100 if step <= LINK_EVERY_ROUNDS else 10) for step in range(20, 121, 20)]
    assert seconds[1] > seconds[0]
    assert seconds[LINK_EVERY_ROUNDS] - seconds[1] == pytest.approx(2 * REPEATS * PROBE_BYTES * 8 / 10e6)
    assert seconds[LINK_EVERY_ROUNDS + 1] == seconds[1]


def test_before_a_plan_groups_are_those_of_the_worker() -> None:
    what = built()
    kind = (torch.float32, torch.device("cpu"))
    sizes = [one // 4 for one in what.scenario.compression.bytes_of_each]  # type: ignore[union-attr]
    first = np.cumsum([0, *sizes]).tolist()
    layout = TensorLayout(tuple(map(str, sizes)), tuple((one,) for one in sizes), (kind,) * len(sizes), tuple(first))
    assert steps_of(what)._groups({}) == layout.by_size(Compressed().min_bytes, Way(compressed=True))


def test_algorithms_that_compress_no_parts_are_those_that_say_so() -> None:
    whole = {name for name in WORDS if not compressor_of(Compressed(algorithm=name), 0).divisible}
    assert whole == WHOLE_ALGORITHMS


def simulated(folder: Path, policies: Sequence[str]) -> dict[str, Outcome]:
    (folder / "link.csv").write_text("seconds,mbit_s\n0,20000\n40,200\n80,20000\n")
    trace = {"trace": "link.csv"}
    what = built(folder, links={"a": trace, "b": trace}, max_s=120.0, learning={"samples": 1e9})
    return {one.policy: one for one in simulate(what, policies, 0)}


def test_the_real_planner_follows_a_link_and_is_as_fast_as_the_best_rule_of_each_stretch(tmp_path: Path) -> None:
    """1. Over a fast link nothing, or little, is compressed. 2. It gets thin: at the next measurement there is another
    plan. 3. It is fast again. Steps in the end of each stretch are no longer than by the best rule, and as long as was
    predicted."""
    found = simulated(tmp_path, [*RULES, "parameters"])
    planned = found["parameters"]
    for begin, end in ((20.0, 40.0), (65.0, 80.0), (100.0, 120.0)):
        steps_s = {
            policy: np.median([point.step_s for point in one.points if begin <= point.now_s < end])
            for policy, one in found.items()
        }
        best = min(seconds for policy, seconds in steps_s.items() if policy != "parameters")
        assert steps_s["parameters"] <= 1.03 * best, (begin, steps_s)
    assert planned.steps > max(found[policy].steps for policy in RULES)
    assert simulated(tmp_path, ["parameters"])["parameters"] == planned, "the same scenario gives the same outcome"
    by_planner = [plan for plan in planned.plans if plan.record.planner == "tensor-groups"]
    first, thin = by_planner[:2]
    assert "nothing is compressed" in first.record.reason
    assert thin.record.reason.startswith("link 20000 → 200 Mbit/s: tensors 1-16: DGC on CPU")
    assert 40 < thin.at_s < 80
    for plan in (first, thin):
        assert plan.record.predicted_s == pytest.approx(float(np.median(plan.seconds)), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compression": None}, "strategy = 'compressed' needs [compression]: ratio, compress, decompress, tensors"),
        ({"entries": 5}, "entries = 5 is not that of [compression]'s tensors"),
        ({"compression": {**COMPRESSION, "ratio": 0}}, "compression.ratio = 0 is wrong"),
        ({"compression": {**COMPRESSION, "compress": [1e-4]}}, "compression.compress"),
        ({"compression": {**COMPRESSION, "tensors": []}}, "compression.tensors = [] is wrong"),
        ({"compression": {**COMPRESSION, "tensors": [{"bytes": 1, "backward": 1, "count": 513}]}}, "513"),
        ({"compression": {**COMPRESSION, "tensors": [*TENSORS, {**TENSORS[0], "count": 500}]}}, "more than 512"),
        ({"compressed": {"algorithm": "best"}}, "[compressed] algorithm = 'best' is wrong"),
    ],
)
def test_a_scenario_that_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as refused:
        built(**changes)
    assert says in str(refused.value)


def test_its_rules_are_no_policies_of_others() -> None:
    what = built(strategy="dense", compressed=None, compression=None, entries=1_000)
    with pytest.raises(BadInput, match="no policy 'by-size'"):
        list(simulate(what, ["by-size"], 0))
