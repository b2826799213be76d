"""Strategies that a script allows, as `run.prepare` reports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from strategy_runs import agent_of
from torch import nn
from zmq_agent import Start

from atoll.agent.runtime.model.inputs import one_module
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.step.measures.gradient_density import GradientDensity
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts
from atoll.agent.runtime.strategy_interface.script_checks import Script, check_script, refused_strategies
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.dense.settings import Dense
from atoll.strategies.stale_sparse.settings import StaleSparse

CPU = torch.device("cpu")
ENGINES = {"groups", "volunteer"}
WITHOUT_ENGINE = {"dense", "zen", "compressed", "stale-sparse", "local-steps"}


def script(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> Script:
    return Script(model=model, optimizers=[optimizer(model.parameters(), lr=0.1)], engine_parts=None, device=CPU)


def pipeline(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> Script:
    parts = EngineParts(
        dataset=[],  # type: ignore[arg-type]
        shuffle=True,
        batch_size=4,
        micro_batches=1,
        loss=nn.functional.mse_loss,
        collate_fn=list,
        place=StagePlace(0, 1, 1),
    )
    return Script(model=model, optimizers=[optimizer(model.parameters(), lr=0.1)], engine_parts=parts, device=CPU)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (script(nn.Linear(3, 3)), ENGINES),
        (script(nn.Embedding(9, 3, sparse=True)), {*registry.strategies()} - {"zen"}),
        (script(nn.Embedding(9, 3, sparse=True), torch.optim.Adam), {*registry.strategies()}),
        (script(one_module((nn.Linear(3, 3), nn.Linear(3, 3)))), {*ENGINES, "compressed"}),
        (script(nn.Linear(3, 3, dtype=torch.float64)), {*ENGINES, "stale-sparse", "local-steps"}),
        (pipeline(nn.Linear(3, 3)), WITHOUT_ENGINE),
        (pipeline(nn.BatchNorm1d(3)), {*WITHOUT_ENGINE, "volunteer"}),
        (pipeline(nn.Linear(3, 3), torch.optim.Adagrad), {*WITHOUT_ENGINE, "groups"}),
    ],
)
def test_of_a_script_the_strategies_that_refuse_it_are_known(given: Script, refused: set[str]) -> None:
    """Each with the sentence that `run.prepare` raises where that strategy is pinned."""
    found = refused_strategies(Dense(), given)
    assert found.keys() == refused
    for name, why in found.items():
        with pytest.raises(BadInput) as raised:
            check_script(registry.find(name).settings(), given)
        assert " ".join(str(raised.value).split()) == why
    for name in registry.strategies().keys() - refused:
        check_script(registry.find(name).settings(), given)


def test_the_jobs_own_strategy_is_asked_with_its_settings() -> None:
    """Adagrad has no sparse form, which `exchange = "gradients"` alone needs."""
    given = script(nn.Linear(3, 3), torch.optim.Adagrad)
    assert "stale-sparse" not in refused_strategies(Dense(), given)
    own = refused_strategies(StaleSparse(exchange="gradients"), given)
    assert "no sparse form of Adagrad" in own["stale-sparse"]


@pytest.mark.parametrize("sparse", [False, True])
def test_density_is_measured_in_the_first_backward_pass(sparse: bool) -> None:
    """An embedding of 10 rows of which a batch reaches 2, and a layer of 6 entries: 2 * 3 + 6 of 36."""
    table, head = nn.Embedding(10, 3, sparse=sparse), nn.Linear(3, 2, bias=False)
    model = nn.Sequential(table, head)
    density = GradientDensity(model)
    assert density.take() is None
    model(torch.tensor([4, 7, 4])).sum().backward()
    assert density.take() == pytest.approx(12 / 36)
    model(torch.tensor([1])).sum().backward()
    assert density.take() is None


def test_a_chosen_strategy_that_the_script_does_not_allow_gives_way_to_dense(tmp_path: Path, start: Start) -> None:
    """1. The controller chose `local-steps`; the model is float64, which it does not take. 2. All ranks train with
    `dense` and report it. 3. Plans with parameters of `local-steps` hold all the same. 4. A pinned one is refused."""
    lines = []
    for automatic in (True, False):
        out = tmp_path / f"automatic-{automatic}"
        out.mkdir()
        with agent_of("local-steps" if automatic else "dense", out, 2, start=start) as agent:
            agent.strategy_is_automatic = automatic
            parameters = {"density": 0.2} if automatic else {}
            agent.params, agent.later_plans = parameters, [agent.plan(2, 5, (3.0, 1.0), parameters)]
            agent.start_workers("regression.py", str(out), "--epochs", "2", "--float64")
            assert agent.exit_codes() == [0, 0], agent.said()
            assert {sample.plan for sample in agent.steps[1]} == {1, 2}
            told = agent.prepared
            assert (told.strategy, told.tensors, told.refused.keys()) == (
                "dense",
                4,
                {"stale-sparse", "local-steps", "groups", "volunteer"},
            )
            assert (agent.said().count("trains by dense: local-steps was chosen automatically") == 1) is automatic
        lines.append([(out / f"run-1-rank-{rank}.jsonl").read_text() for rank in range(2)])
    assert lines[0] == lines[1]
    with agent_of("local-steps", tmp_path, 2, start=start) as agent:
        agent.start_workers("regression.py", str(tmp_path), "--float64")
        assert agent.exit_codes() == [1, 1]
        assert "an exchange of sparse parts needs dense float32" in agent.said()
