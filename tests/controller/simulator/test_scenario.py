"""Scenario files: what is refused, and by which name."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.controller.simulator import presets
from atoll.controller.simulator.cluster import build
from atoll.controller.simulator.scenario import Scenario, check, read
from atoll.errors import BadInput, NotFound
from atoll.strategies import registry

DEVICE = {"q": 0.001, "s": 0.0, "k": 0.002, "m": 0.0}
VALID: dict[str, Any] = {"total_batch": 64, "entries": 1000, "devices": [DEVICE]}
EXTRA = {"sparsities": [0.9, 0.99], "batches": [32, 64], "extra": [[0.0, 0.1], [0.1, 0.2]]}
SPARSE = {"strategy": "stale-sparse", "learning": {"extra": EXTRA}}
SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"total_bach": 1}, "unknown field 'total_bach'. Did you mean 'total_batch'?"),
        ({"devices": [{**DEVICE, "colour": 1}]}, "unknown field 'devices[0].colour'. Did you mean 'count'?"),
        ({"learning": {"extra": {**EXTRA, "sparsity": 1}}}, "'learning.extra.sparsity'. Did you mean 'sparsities'?"),
        ({"links": {"a": {"mbit": 1}}}, "'links.a.mbit'. Did you mean 'mbit_s'?"),
        ({"devices": [{"q": 1.0}]}, "devices[0] needs either preset, or all of q, s, k, m, or alpha and beta"),
        ({"devices": [{**DEVICE, "alpha": 1, "beta": 2}]}, "needs either preset"),
        ({"devices": [{"q": 0, "s": 1, "k": 0, "m": 1}]}, "a sample must take time"),
        ({"devices": [{**DEVICE, "joins_s": 5, "leaves_s": 5}]}, "must be later than joins_s"),
        ({"devices": []}, "needs [[devices]] or a cluster"),
        ({"entries": None}, "needs entries"),
        ({"strategy": "stale-sparse"}, "needs [learning.extra]"),
        ({"strategy": "fast"}, "strategy = 'fast' is wrong"),
        ({"total_batch": 0}, "total_batch = 0 is wrong"),
        ({"total_batch": 6.5}, "total_batch = 6.5 is wrong"),
        ({**SPARSE, "stale_sparse": {"sparsity": float("nan")}}, "[stale_sparse] sparsity = nan is wrong"),
        (
            {**SPARSE, "stale_sparse": {"sparsty": 0.9}},
            "[stale_sparse] unknown field 'sparsty'. Did you mean 'sparsity'?",
        ),
        ({"links": {"a": {}}}, "links.a needs either mbit_s or trace"),
        ({"changes": [{"at_s": 1, "device": "x"}]}, "changes[0] needs either device and speed, or island and mbit_s"),
        ({"learning": {"batches": [64, 32]}}, "must be lowest and highest"),
        ({"learning": {"extra": {**EXTRA, "sparsities": [0.99, 0.9]}}}, "sparsities must ascend"),
        ({"learning": {"extra": {**EXTRA, "batches": [64, 64]}}}, "batches must ascend"),
        ({"learning": {"extra": {**EXTRA, "extra": [[0.0, 0.1]]}}}, "must have 2 rows of 2"),
        ({"policies": []}, "policies = [] is wrong"),
    ],
)
def test_a_wrong_scenario_is_refused_by_its_field(change: dict[str, Any], said: str) -> None:
    document = {key: value for key, value in {**VALID, **change}.items() if value is not None}
    with pytest.raises(BadInput) as refused:
        check(Scenario, document, "x.toml")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "resnet5"}, "no model 'resnet5'. Did you mean 'resnet50'?"),
        ({"cluster": "cannikin-c", "model": "bert"}, "no cluster 'cannikin-c'. Did you mean 'cannikin-"),
        ({"devices": [{"preset": "rtx-4090"}]}, "needs to know the model"),
        (
            {"devices": [{"preset": "rtx-4091"}], "model": "swin-b"},
            "no device preset 'rtx-4091'. Did you mean 'rtx-4090'?",
        ),
        ({"devices": [{"preset": "rtx-4090"}], "model": "bert"}, "With this model: a100"),
        ({"devices": [{**DEVICE, "name": "x"}, {**DEVICE, "name": "x"}]}, "two devices are called 'x'"),
        ({"devices": [{**DEVICE, "joins_s": 1}]}, "no device is there at the start"),
        ({"devices": [{**DEVICE, "count": 9000}, {**DEVICE, "count": 9000}]}, "more than 10000 devices"),
        ({"links": {"b": {"mbit_s": 1}}}, "links.b: no device is in that island. Islands: a"),
        ({"devices": [DEVICE, {**DEVICE, "island": "b"}]}, "island 'a' has no link"),
        ({"changes": [{"at_s": 1, "device": "dev", "speed": 1}]}, "no device changes[0].device = 'dev'"),
        ({"changes": [{"at_s": 1, "island": "b", "mbit_s": 1}]}, "no link changes[0].island = 'b'"),
    ],
)
def test_what_does_not_exist_is_refused_by_its_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        build(check(Scenario, {**VALID, **change}, "x.toml"), tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"), [(b"total_batch = ", "not valid TOML"), (b"\xff", "not UTF-8"), (b" " * (5 << 20), "4.0 MiB")]
)
def test_a_file_that_is_no_scenario_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=said):
        check(Scenario, read(path), "scenario")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not there"):
        check(Scenario, read(tmp_path / "x.toml"), "scenario")


OF_DEVICES = [path for path in sorted(SCENARIOS.glob("*.toml")) if "kind" not in read(path)]


@pytest.mark.parametrize("path", OF_DEVICES, ids=lambda path: path.stem)
def test_every_example_can_be_simulated(path: Path) -> None:
    cluster = build(check(Scenario, read(path), "scenario"), path.parent)
    assert cluster.devices


def test_presets_are_those_of_the_papers() -> None:
    """StellaTrain (2024), Table 2; Cannikin (2024), section 6: an A100 is 3.42 times an RTX 6000."""
    vit = presets.cost("rtx-4090", "vit-b-16")
    assert (vit.floor, 1 / (vit.q + vit.k)) == (28, pytest.approx(300))
    fast, slow = (presets.cost(name, "resnet50") for name in ("a100", "rtx-6000"))
    assert (slow.q + slow.k) / (fast.q + fast.k) == pytest.approx(3.42)
    assert sum(presets.CLUSTERS["cannikin-b"].values()) == 16
    assert len(presets.listed()) == 2 + len(presets.MODELS) + 9 + 30


def test_the_scenario_of_the_manual_can_be_simulated() -> None:
    manual = (SCENARIOS.parents[1] / "docs" / "simulator.md").read_text()
    text = manual.partition("```toml\n")[2].partition("```")[0]
    scenario = check(Scenario, tomllib.loads(text), "docs/simulator.md")
    assert build(scenario, SCENARIOS).devices[0].bounds.max_batch == 128
    told = set(tomllib.loads(text))
    assert set(Scenario.model_fields) - told == {"model", "cluster", "strategy_settings"}


def test_a_strategy_that_cannot_be_simulated_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = replace(registry.find("dense"), name="toy", simulator="")
    both = {"dense": registry.find("dense"), "toy": toy}
    monkeypatch.setattr(registry, "strategies", lambda: both)
    with pytest.raises(BadInput, match="strategy = 'toy' is wrong. Use one of dense"):
        check(Scenario, {**VALID, "strategy": "toy"}, "x.toml")
