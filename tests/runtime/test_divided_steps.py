"""Batches that a plan divides into several passes, with one update each: they train what whole batches do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from zmq_agent import FakeAgent, Start

from atoll.strategies.declaration import as_json

pytestmark = pytest.mark.timeout(240)


EXACT = {"sparsity": 0.0, "staleness": 0, "values": "float32", "digest_every": 1, "momentum": "as-is"}


def trained(
    out: Path, *options: str, passes: int, ranks: int, start: Start, strategy: tuple[str, dict[str, Any]] = ("", {})
) -> dict[str, Any]:
    out.mkdir()
    with FakeAgent(out, world_size=ranks, start=start) as agent:
        agent.spec.strategy, settings = strategy
        agent.spec.strategy_settings = as_json(settings) if settings else ""
        agent.passes, agent.shares = passes, (3.0, 1.0)[:ranks]
        agent.start_workers("divided.py", str(out), *options)
        assert agent.exit_codes() == [0] * ranks, agent.said()
        steps = agent.steps[0]
    assert len(steps) == 10
    assert {step.passes for step in steps} == {passes}
    ends = [torch.load(out / f"rank-{rank}.end", weights_only=True) for rank in range(ranks)]
    apart = 1e-5 if strategy[0] == "stale-sparse" else 0.0  # its live weights differ in rounding
    for end in ends[1:]:
        torch.testing.assert_close(end["weights"], ends[0]["weights"], rtol=apart, atol=apart)
    return dict(ends[0])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        ("--scheduler",),
        ("--scheduler", "--untold"),
        ("--adam", "--clip", "--averaged"),
        ("--scaler", "--clip"),
        ("--counts",),
    ],
    ids=" ".join,
)
def test_divided_batches_train_what_whole_ones_do(
    options: tuple[str, ...], ranks: int, tmp_path: Path, start: Start
) -> None:
    whole = trained(tmp_path / "whole", *options, passes=1, ranks=ranks, start=start)
    divided = trained(tmp_path / "divided", *options, passes=3, ranks=ranks, start=start)
    torch.testing.assert_close(divided, whole, rtol=1e-4, atol=1e-6)
    made = [json.loads((tmp_path / "divided" / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    assert made[0][:3] == ([6, 6, 6] if ranks == 2 else [8, 8, 8])
    assert [sum(rows) for rows in zip(*made, strict=True)] == ([8] * 12 + [2, 1, 1]) * 2


@pytest.mark.parametrize(
    "strategy",
    [
        ("zen", {}),
        ("stale-sparse", {**EXACT, "exchange": "gradients"}),
        ("stale-sparse", {**EXACT, "exchange": "updates"}),
    ],
    ids=["zen", "gradients", "updates"],
)
def test_other_strategies_train_divided_batches_too(
    strategy: tuple[str, dict[str, Any]], tmp_path: Path, start: Start
) -> None:
    how: Any = {"ranks": 2, "start": start, "strategy": strategy}
    whole = trained(tmp_path / "whole", passes=1, **how)
    divided = trained(tmp_path / "divided", passes=3, **how)
    torch.testing.assert_close(divided["weights"], whole["weights"], rtol=1e-3, atol=1e-5)


def test_gradients_of_a_scripts_own_backward_pass_are_divided_too(tmp_path: Path, start: Start) -> None:
    whole = trained(tmp_path / "whole", "--own-backward", passes=1, ranks=2, start=start)
    divided = trained(tmp_path / "divided", "--own-backward", passes=3, ranks=2, start=start)
    torch.testing.assert_close(divided, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("option", "ranks"), [("--accumulates", 2), ("--own-backward", 1)])
def test_a_script_that_makes_no_update_in_each_batch_is_refused(
    option: str, ranks: int, tmp_path: Path, start: Start
) -> None:
    with FakeAgent(tmp_path, world_size=ranks, start=start) as agent:
        agent.passes, agent.shares = 3, (1.0,) * ranks
        agent.start_workers("divided.py", str(tmp_path), option)
        assert all(agent.exit_codes())
        assert "this script cannot take it in parts" in agent.said()
        assert "use a smaller batch_size" in agent.said()
