from __future__ import annotations

from pathlib import Path

import pytest

from atoll.client.job_file import AdaptSection
from atoll.errors import BadInput, SettingError
from atoll.strategies import manual, registry
from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.declaration import as_json, load
from atoll.strategies.dense.settings import Dense
from atoll.strategies.stale_sparse.plan import StaleSparsePlan
from atoll.strategies.stale_sparse.settings import StaleSparse


def test_strategies_are_found_by_name_and_by_settings() -> None:
    assert list(registry.strategies()) == [
        "dense",
        "stale-sparse",
        "local-steps",
        "zen",
        "groups",
        "compressed",
        "volunteer",
    ]
    assert registry.find("").name == registry.default().name == "dense"
    for settings in (Dense(), StaleSparse()):
        assert registry.of(settings).settings is type(settings)
    known = "dense, stale-sparse, local-steps, zen, groups, compressed, volunteer"
    with pytest.raises(SettingError, match=f"strategy = 'ring' is not known. Use one of auto, {known}"):
        registry.find("ring")


def test_every_part_that_a_strategy_names_is_there() -> None:
    for strategy in registry.strategies().values():
        for part in (strategy.worker, strategy.controller, strategy.simulator, strategy.view):
            assert not part or callable(load(part)), part


def test_settings_and_parameters_travel_as_text() -> None:
    sparse = registry.find("stale-sparse")
    settings = StaleSparse(sparsity=0.0, staleness=0, exchange="gradients", error_feedback=False, digest_every=7)
    assert sparse.read_settings(as_json(settings.said())) == settings
    assert sparse.read_settings("") == StaleSparse()
    assert as_json(StaleSparsePlan().said()) == ""
    assert sparse.read_plan_parameters('{"sparsity":0.9}') == StaleSparsePlan(sparsity=0.9)
    with pytest.raises(BadInput, match="plan.colour = 1 is not known. Known: sparsity"):
        sparse.read_plan_parameters('{"colour":1}', "plan")
    with pytest.raises(BadInput, match="plan has 20000 characters"):
        sparse.read_plan_parameters(" " * 20_000, "plan")


def test_what_only_plans_say_is_no_option_of_a_job() -> None:
    """`[adapt] ways` was accepted, since a plan of `compressed` has such a field, and did nothing."""
    assert StaleSparsePlan.adjustable() == ("sparsity",)
    assert CompressedPlan.adjustable() == ()
    offered = {name for each in registry.strategies().values() for name in each.plan_parameters.adjustable()}
    assert offered == set(AdaptSection.model_fields) - {"batch", "learning_rate", "profile"}


def test_a_parameter_that_a_plan_leaves_out_is_as_before() -> None:
    assert StaleSparsePlan().over(StaleSparsePlan(sparsity=0.9)) == StaleSparsePlan(sparsity=0.9)
    assert StaleSparsePlan(sparsity=0.5).over(StaleSparsePlan(sparsity=0.9)) == StaleSparsePlan(sparsity=0.5)


def test_the_manual_has_their_tables() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "strategies.md").read_text()
    assert manual.strategies_table() in page
    for strategy in registry.strategies().values():
        if strategy.settings.model_fields:
            assert manual.settings_table(strategy) in page
        if strategy.metrics:
            assert manual.metrics_table(strategy) in page
