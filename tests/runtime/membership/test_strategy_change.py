"""A run changes its strategy at a boundary, in the same processes. Real processes and gloo; the test plays agent and
controller."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_runs import (
    check_alike,
    check_every_sample_once,
    check_nothing_was_lost,
    kept,
    left,
    sparse,
    together,
    trained,
)
from strategy_runs import Tensors
from zmq_agent import FakeAgent, Start

from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN

pytestmark = pytest.mark.timeout(240)

KILLED = -signal.SIGKILL
ALIKE = (6.0, 6.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "zen": {},
    "local-steps": {"density": 0.2, "values": "float32", "digest_every": 3},
    "stale-sparse": {"sparsity": 0.9, "values": "float32", "digest_every": 3},
    "compressed": {"algorithm": "threshold", "density": 0.1, "min_bytes": 0},
}
PAIRS = [
    ("dense", "local-steps"),
    ("dense", "compressed"),
    ("local-steps", "compressed"),
    ("zen", "local-steps"),
    ("stale-sparse", "dense"),
    ("compressed", "stale-sparse"),
]


def two_islands(out: Path, start: Start, strategy: str) -> FakeAgent:
    agent = sparse(out, 2, start=start, strategy=strategy, **SETTINGS[strategy])
    agent.place(["a", "b"], ["here", "there"])
    agent.shares, agent.makes_views = ALIKE, True
    return agent


def change(agent: FakeAgent, view: int, strategy: str, **others: Any) -> None:
    """Change the strategy in this view, and wait until both ranks have made steps in it."""
    agent.send_view(
        view,
        [0, 1],
        ALIKE,
        plan_id=view,
        in_force=view - 1,
        at_boundary=True,
        strategy=strategy,
        settings=SETTINGS[strategy],
        **others,
    )
    agent.put_in_force()
    here = agent.alive[0][0]
    agent.wait_until(lambda: min(agent.alive[rank][0] for rank in (0, 1)) > here + 3)


def residuals(states: list[dict[str, Any]]) -> Tensors:
    """What all ranks have not sent; zeros where the strategy keeps nothing."""
    found: Tensors = defaultdict(lambda: torch.zeros(()))
    found.update(left(states))
    return found


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_changes_its_strategy_there_and_back_and_loses_nothing(
    tmp_path: Path, start: Start, first: str, second: str
) -> None:
    """1. Two workers of two islands train by one strategy. 2. A view of the same two has another one: they leave for it
    at a boundary. 3. A later view goes back. 4. Each sample counts once. Weights are the same on both ranks, and their
    way is all gradients that there were: what the strategy before had not sent came with the change."""
    with two_islands(tmp_path, start, first) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "40", "--sleep-s", "0.005",
                            "--await-view-at", "300", "--awaited-view", "3")  # fmt: skip
        agent.wait_for_step(12)
        change(agent, 2, second)
        assert {agent.stands[rank][-1].strategy for rank in (0, 1)} == {second}
        change(agent, 3, first)
        assert agent.exit_codes(120) == [0, 0], agent.said()
        assert VIEW_STAGE_BROKEN not in [one.stage for said in agent.stands.values() for one in said]
    assert {line["view"] for line in trained(tmp_path)} == {1, 2, 3}
    check_every_sample_once(tmp_path, 40)
    ended = [kept(tmp_path, 1, rank, "end") for rank in (0, 1)]
    check_alike(ended, "live")
    check_nothing_was_lost(
        kept(tmp_path, 1, 0, "begin")["shared_params"],
        check_alike(ended, "shared_params"),
        together(ended, "summed"),
        residuals(ended),
        "gradients" if first == "compressed" else "updates",
    )
