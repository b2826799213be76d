"""A worker is lost that had kept something for itself: the others go on in place from the newest state that is whole in
memory, with its residual. Real processes and SIGKILL; the test plays agent and controller."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_runs import check_alike, check_every_sample_once, check_nothing_was_lost, kept, sparse, together, trained
from zmq_agent import FakeAgent, Start

from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_UNABLE

pytestmark = pytest.mark.timeout(240)

KILLED = -signal.SIGKILL
UPDATES: dict[str, Any] = {"sparsity": 0.9, "values": "float32", "digest_every": 3}
GRADIENTS: dict[str, Any] = {**UPDATES, "exchange": "gradients"}
LOCAL: dict[str, Any] = {"strategy": "local-steps", "density": 0.2, "values": "float32", "digest_every": 3}


def of_three(out: Path, start: Start, replicas: int, settings: dict[str, Any]) -> FakeAgent:
    agent = sparse(out, 3, start=start, **settings)
    agent.makes_views, agent.own_directories, agent.memory = True, True, out / "memory"
    agent.spec.checkpoint.memory_replicas, agent.spec.checkpoint.every_steps = replicas, 0
    agent.place(["a", "b", "c"], ["a", "b", "c"])
    return agent


@pytest.mark.parametrize("settings", [UPDATES, GRADIENTS, LOCAL], ids=["updates", "gradients", "local-steps"])
def test_who_is_left_goes_on_with_the_residuals_of_all(tmp_path: Path, start: Start, settings: dict[str, Any]) -> None:
    """1. Three workers keep each other's state in memory, and send a tenth of it in each step; one dies. 2. The other
    two go back in the same process, to the newest step that is whole in memory: masters are the same, and what the dead
    one had not sent until then is one survivor's. 3. They end: all gradients that count are in the masters or still
    residuals, and each sample counted once an epoch."""
    with of_three(tmp_path, start, 2, settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--keep-sums", "--often", "--sleep-s", "0.05",
                            "--raise-at", "16")  # fmt: skip
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, 0], agent.said()
    again = [line for line in trained(tmp_path) if line["view"] == 2]
    step = min(line["step"] for line in again)
    assert 9 < step <= 16
    assert sorted(line["step"] for line in again) == sorted([*range(step, 27)] * 2)
    check_every_sample_once(tmp_path, epochs=3)
    ended = [kept(tmp_path, 1, rank, "end") for rank in (0, 2)]
    lost = {"summed": torch.load(tmp_path / f"run-1-rank-1.sums-{step}", weights_only=True)}
    gradients, residuals = together([*ended, lost], "summed"), together(ended, "residuals")
    origin = kept(tmp_path, 1, 0, "begin")["masters"]
    masters = check_alike(ended, "masters")
    sums = together(ended, "owner_sums")
    for name, one in sums.items():  # of masters, what they are behind by
        residuals[name] = residuals[name] + one
    exchange = settings.get("exchange", "updates")
    check_nothing_was_lost(origin, masters, gradients, residuals, exchange)


def test_without_a_copy_of_what_is_lost_it_starts_again_and_says_so(tmp_path: Path, start: Start) -> None:
    """1. As above, but nobody keeps another's state in memory. 2. The survivors say what is missing, save what they
    have as they would without views, and end with 75."""
    with of_three(tmp_path, start, 1, UPDATES) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--often", "--sleep-s", "0.05", "--raise-at", "7")
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        assert agent.exit_codes() == [75, KILLED, 75], agent.said()
        assert [agent.stands[rank][-1].stage for rank in (0, 2)] == [VIEW_STAGE_UNABLE] * 2
        assert "memory_replicas" in agent.stands[0][-1].reason
        assert any("checkpoint" in line for line in agent.said().splitlines() if "lost a peer" in line), agent.said()
