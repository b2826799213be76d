"""A run changes its strategy at a boundary, in the same processes. Real processes and gloo; the test plays agent and
controller."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from in_place_runs import FIRST
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
from torch import nn
from zmq_agent import FakeAgent, Start

from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_FAILED, VIEW_STAGE_READY

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


def two_islands(out: Path, start: Start, strategy: str, *, run: int = 1) -> FakeAgent:
    agent = sparse(out, 2, start=start, run=run, strategy=strategy, **SETTINGS[strategy])
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
        **{"strategy": strategy, "settings": SETTINGS.get(strategy), **others},
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


def three_islands(out: Path, start: Start, strategy: str) -> FakeAgent:
    agent = sparse(out, 3, start=start, strategy=strategy, **SETTINGS[strategy])
    agent.place(["a", "b", "c"], ["here", "there", "beyond"])
    agent.shares, agent.makes_views = FIRST, True
    return agent


@pytest.mark.parametrize("where", ["building", "starting"])
@pytest.mark.parametrize(("first", "second"), [("dense", "local-steps"), ("local-steps", "dense")])
def test_a_worker_that_dies_as_another_strategy_begins_holds_nobody_up(
    tmp_path: Path, start: Start, first: str, second: str, where: str
) -> None:
    """1. Three workers have left for a view by another strategy. One gets SIGKILL as it begins it. 2. The two others
    are equal already, and continue with it in their processes. 3. Each sample counts once, and weights are the same."""
    with three_islands(tmp_path, start, first) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "12", "--sleep-s", "0.005", "--die-in-view",
                            where, "--keep-sums", "--await-view-at", "20", "--awaited-view", "2")  # fmt: skip
        agent.wait_for_step(12)
        by = {"strategy": second, "settings": SETTINGS[second]}
        agent.send_view(2, [0, 1, 2], FIRST, plan_id=2, at_boundary=True, **by)
        # Under `dense` it is missed in the first step.
        missed = ((2, VIEW_STAGE_FAILED), (2, VIEW_STAGE_BROKEN))
        agent.wait_until(lambda: all(agent.stands_at(rank) in missed for rank in (0, 1)))
        agent.send_view(3, [0, 1], ALIKE, plan_id=3, **by)
        agent.put_in_force()
        assert agent.exit_codes(90) == [0, 0, KILLED], agent.said()
        assert {agent.stands[rank][-1].strategy for rank in (0, 1)} == {second}
    check_every_sample_once(tmp_path, 12)
    check_alike([kept(tmp_path, 1, rank, "end") for rank in (0, 1)], "live")


def test_a_worker_that_dies_while_it_hands_over_costs_what_it_had_alone(tmp_path: Path, start: Start) -> None:
    """1. Three workers leave `local-steps`. One gets SIGKILL in the middle of the handover. 2. The others are not equal
    yet: the next view is by `local-steps`, as after every loss. 3. The one after it is by `dense`. 4. They train to the
    end in their processes, with the same weights."""
    with three_islands(tmp_path, start, "local-steps") as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "120", "--sleep-s", "0.01", "--keep-sums",
                            "--await-view-at", "21", "--awaited-view", "2", "--break-flush", "2:9")  # fmt: skip
        agent.wait_for_step(20)
        by = {"strategy": "dense", "settings": {}}
        agent.send_view(2, [0, 1, 2], FIRST, plan_id=2, at_boundary=True, **by)
        agent.wait_until(lambda: agent.workers[2].poll() is not None)
        agent.send_view(3, [0, 1], ALIKE, plan_id=3, strategy="local-steps", settings=SETTINGS["local-steps"])
        agent.put_in_force()
        change(agent, 4, "dense")
        assert agent.exit_codes(90) == [0, 0, KILLED], agent.said()
        assert {agent.stands[rank][-1].strategy for rank in (0, 1)} == {"dense"}
    check_alike([kept(tmp_path, 1, rank, "end") for rank in (0, 1)], "live")


def test_a_worker_joins_a_run_that_has_changed_its_strategy(tmp_path: Path, start: Start) -> None:
    """1. A third worker is launched by `dense` beside two. 2. They change to `local-steps` before it is ready. 3. It
    joins by `local-steps`, with their shared parameters; each sample counts once."""
    with two_islands(tmp_path, start, "dense") as agent:
        agent.place(["a", "b", "c"], ["here", "there", "beyond"])
        arguments = (str(tmp_path), "--epochs", "16", "--sleep-s", "0.01")
        agent.start_workers("stale_train.py", *arguments, "--await-view-at", "120", "--awaited-view", "3")
        agent.wait_for_step(8)
        joined = agent.start_joiner("stale_train.py", *arguments)
        change(agent, 2, "local-steps")
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        agent.send_view(3, [0, 1, joined], FIRST, plan_id=3, in_force=2, without_state=[joined], at_boundary=True,
                        keeps_unsent=True, strategy="local-steps", settings=SETTINGS["local-steps"])  # fmt: skip
        agent.put_in_force()
        assert agent.exit_codes(90) == [0, 0, 0], agent.said()
        assert agent.stands[joined][-1].strategy == "local-steps"
    check_every_sample_once(tmp_path, 16)
    check_alike([kept(tmp_path, 1, rank, "end") for rank in (0, 1, joined)], "live")


def in_plain_torch(out: Path, optimizer: type[torch.optim.Optimizer]) -> tuple[Tensors, list[float]]:
    """Train the same batches in one process without Atoll. Return the weights, and each step's loss before it."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 1))
    model.load_state_dict(kept(out, 1, 0, "begin")["live"])
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(100, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    batches: dict[int, list[int]] = defaultdict(list)
    for line in trained(out):
        batches[line["step"]] += line["ids"]
    own, losses = optimizer(model.parameters(), lr=0.01), []  # type: ignore[call-arg]
    for step in sorted(batches):
        own.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[batches[step]]), targets[batches[step]])
        loss.backward()
        own.step()
        losses.append(loss.item())
    return dict(model.named_parameters()), losses


def losses_of(out: Path) -> list[float]:
    """The loss of each step's whole batch."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for line in trained(out):
        found[line["step"]].append((len(line["ids"]), line["loss"]))
    return [sum(n * loss for n, loss in parts) / sum(n for n, _ in parts) for _, parts in sorted(found.items())]


def test_there_and_back_at_exact_settings_is_plain_torch(tmp_path: Path, start: Start) -> None:
    """`local-steps` that sends everything at once is the whole batch's SGD: so is all of dense, local-steps, dense."""
    exact = {"density": 1.0, "values": "float32", "staleness": 0, "digest_every": 3}
    with two_islands(tmp_path, start, "dense") as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "30", "--sleep-s", "0.005",
                            "--await-view-at", "250", "--awaited-view", "3")  # fmt: skip
        agent.wait_for_step(12)
        change(agent, 2, "local-steps", settings=exact)
        change(agent, 3, "dense")
        assert agent.exit_codes(120) == [0, 0], agent.said()
    weights, losses = in_plain_torch(tmp_path, torch.optim.SGD)
    for name, one in kept(tmp_path, 1, 0, "end")["live"].items():
        torch.testing.assert_close(one, weights[name].detach(), rtol=1e-4, atol=1e-5)
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-3)


def test_there_and_back_with_adam_on_two_islands_learns_as_plain_torch(tmp_path: Path, start: Start) -> None:
    """Moments of the islands become one at the change: the loss goes on without a jump, and ends where torch's does."""
    with two_islands(tmp_path, start, "dense") as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "40", "--sleep-s", "0.005", "--adamw",
                            "--await-view-at", "300", "--awaited-view", "3")  # fmt: skip
        agent.wait_for_step(60)
        change(agent, 2, "local-steps")
        agent.wait_for_step(agent.alive[0][0] + 60)
        change(agent, 3, "dense")
        assert agent.exit_codes(120) == [0, 0], agent.said()
    check_every_sample_once(tmp_path, 40)
    check_alike([kept(tmp_path, 1, rank, "end") for rank in (0, 1)], "live")
    _, plain = in_plain_torch(tmp_path, torch.optim.AdamW)
    losses = losses_of(tmp_path)
    begins = [min(line["step"] for line in trained(tmp_path) if line["view"] == view) for view in (2, 3)]
    for step in begins:
        before, after = sum(losses[step - 18 : step]), sum(losses[step : step + 18])
        assert after < 1.5 * before + 0.01, f"the loss jumps at step {step}: {before:.4g} to {after:.4g}"
    assert sum(losses) < 1.3 * sum(plain)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_one_island_there_and_back_has_the_bits_of_no_change(tmp_path: Path, start: Start, optimizer: str) -> None:
    """An island is one replica, so each step of it is that of `dense`: a change leaves no trace in the weights."""
    ends: list[Tensors] = []
    for changes in (False, True):
        out = tmp_path / str(changes)
        out.mkdir()
        arguments = [str(out), "--epochs", "20", "--sleep-s", "0.005", *(["--adamw"] if optimizer == "adamw" else [])]
        with two_islands(out, start, "dense") as agent:
            agent.place(["a", "b"], ["here", "here"])
            waits = ["--await-view-at", "150", "--awaited-view", "3"] if changes else []
            agent.start_workers("stale_train.py", *arguments, *waits)
            if changes:
                agent.wait_for_step(12)
                change(agent, 2, "local-steps")
                change(agent, 3, "dense")
            assert agent.exit_codes(120) == [0, 0], agent.said()
        ends.append(check_alike([kept(out, 1, rank, "end") for rank in (0, 1)], "live"))
    for name, one in ends[0].items():
        assert torch.equal(one, ends[1][name]), name


def test_a_strategy_that_the_script_does_not_allow_is_not_begun(tmp_path: Path, start: Start) -> None:
    """1. Two workers are told of a view by a strategy that trains no such script. 2. They are in that view by the one
    before, say why, and lose no step. 3. A later view changes to one that the script allows."""
    with two_islands(tmp_path, start, "dense") as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "20", "--sleep-s", "0.005",
                            "--await-view-at", "150", "--awaited-view", "3")  # fmt: skip
        agent.wait_for_step(12)
        change(agent, 2, "groups", settings={})
        for rank in (0, 1):
            assert agent.stands[rank][-1].strategy == "dense"
            assert "strategy groups makes the updates itself" in agent.stands[rank][-1].refusal
        change(agent, 3, "local-steps")
        assert agent.exit_codes(120) == [0, 0], agent.said()
        assert [(agent.stands[rank][-1].strategy, agent.stands[rank][-1].refusal) for rank in (0, 1)] == [
            ("local-steps", "")
        ] * 2
    check_every_sample_once(tmp_path, 20)


@pytest.mark.parametrize(("first", "second"), [("dense", "local-steps"), ("local-steps", "compressed")])
def test_a_checkpoint_after_the_change_restores_into_the_new_strategy(
    tmp_path: Path, start: Start, first: str, second: str
) -> None:
    """1. Two workers change their strategy, save and are stopped. 2. The next run is by the new strategy: it takes over
    what they had not sent by it, and nothing of the strategy before. Each sample counts once, and no gradient is
    lost."""
    with two_islands(tmp_path, start, first) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "600", "--sleep-s", "0.01")
        agent.wait_for_step(12)
        change(agent, 2, second)
        agent.send_stop(1)
        assert agent.exit_codes(90) == [85, 85], agent.said()
    epochs = 1 + max(line["epoch"] for line in trained(tmp_path))
    with two_islands(tmp_path, start, second, run=2) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", str(epochs))
        assert agent.exit_codes() == [0, 0], agent.said()
        assert not [text for text in agent.warnings if "is by strategy" in text]
    check_every_sample_once(tmp_path, epochs)
    states, ended = (
        [kept(tmp_path, 1, rank, "end") for rank in (0, 1)],
        [kept(tmp_path, 2, rank, "end") for rank in (0, 1)],
    )
    check_nothing_was_lost(
        kept(tmp_path, 1, 0, "begin")["shared_params"],
        check_alike(ended, "shared_params"),
        together([*states, *ended], "summed"),
        residuals(ended),
        "gradients" if second == "compressed" else "updates",
    )


def test_a_run_by_another_strategy_than_its_checkpoint_says_what_does_not_count(tmp_path: Path, start: Start) -> None:
    """Updates that `local-steps` had not sent mean nothing to gradients that `compressed` leaves out."""
    with two_islands(tmp_path, start, "local-steps") as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "600", "--sleep-s", "0.01")
        agent.wait_for_step(12)
        agent.send_stop(1)
        assert agent.exit_codes(90) == [85, 85], agent.said()
    with two_islands(tmp_path, start, "compressed", run=2) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "4")
        assert agent.exit_codes() == [0, 0], agent.said()
        [told] = [text for text in agent.warnings if "is by strategy local-steps" in text]
        assert "this run trains by compressed: what a worker had not sent by then does not count" in told
    assert kept(tmp_path, 2, 0, "begin")["residuals"].keys() == kept(tmp_path, 2, 0, "end")["residuals"].keys()
    assert not any(bool(one.any()) for one in kept(tmp_path, 2, 0, "begin")["residuals"].values())
