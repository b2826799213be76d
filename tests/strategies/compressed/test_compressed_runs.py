"""Whole runs of strategy compressed: real worker processes, their own sockets between them. Each test is a story."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from held_ports import free_port
from strategy_runs import Tensors, agent_of, ended, undisturbed
from zmq_agent import Start, torchrun_like

from atoll.strategies.compressed.costs.measured import MeasuredCosts

pytestmark = pytest.mark.timeout(300)
LARGEST = {"algorithm": "dgc", "density": 0.2, "min_bytes": 0}


@pytest.mark.parametrize("islands", [("alone",), ("west", "west", "east")], ids=len)
def test_every_algorithm_loses_nothing_on_all_ranks_and_one_alone_has_momentum_too(
    start: Start, islands: tuple[str, ...]
) -> None:
    """By each algorithm ranks end with the same bits. Where the gradient does not depend on the weights, what arrived
    and what all ranks still keep are what dense sends. Momentum of gradients that are not compressed is an
    optimizer's."""
    ports = ",".join(str(free_port()) for _ in range(22))
    codes = torchrun_like("compressed_cases.py", ports, world_size=len(islands), islands=islands, start=start)
    assert codes == [0] * len(islands)


def test_a_pass_that_is_broken_off_changes_nothing_of_momentum(start: Start, tmp_path: Path) -> None:
    """1. Rank 1 is killed before it sends in step 5; rank 0 had added its own gradient to its momentum by then. 2. What
    rank 0 saves of step 4 is what it saves in a run that is stopped there."""
    settings = {**LARGEST, "momentum": 0.9}
    for folder, said, codes in (
        ("killed", ("--fault", "5:1:die"), [75, -9]),
        ("stopped", ("--await-stop-at", "4"), [85, 85]),
    ):
        (tmp_path / folder).mkdir()
        with agent_of("compressed", tmp_path / folder, 2, start=start, **settings) as agent:
            agent.start_workers("compressed_train.py", str(tmp_path / folder), *said)
            if folder == "stopped":
                agent.send_stop_in(4, 0)
            assert agent.exit_codes() == codes, agent.said()
    killed, stopped = (
        torch.load(tmp_path / one / "run-1-rank-0.own", weights_only=True) for one in ("killed", "stopped")
    )
    assert equal(killed, stopped)
    assert any(one.any() for name, one in stopped.items() if name.startswith("velocity."))


def test_plans_group_the_tensors_on_all_ranks_from_one_step_on(start: Start, tmp_path: Path) -> None:
    """1. Two islands, of two ranks and of one, unequal shares. 2. A plan makes one group of all tensors, divisible and
    on the CPU, a later one of two that are not compressed. 3. Ranks end with the same weights, each step tells what
    left, and what workers measured is told."""
    plans: Sequence[dict[str, Any]] = (
        {"ways": ["cpu/cpu/divisible"], "groups": [[4, 0]]},
        {"ways": ["none"], "groups": [[1, 0], [3, 0]]},
    )
    with agent_of("compressed", tmp_path, 3, start=start, **LARGEST) as agent:
        agent.place(["a", "a", "b"], ["west", "west", "east"])
        agent.shares = (1.0, 2.0, 1.0)
        agent.later_plans = [agent.plan(2, 6, (3.0, 1.0, 0.001), plans[0]), agent.plan(3, 14, (1.0,) * 3, plans[1])]
        agent.start_workers("compressed_train.py", str(tmp_path), "--epochs", "3")
        assert agent.exit_codes() == [0] * 3, agent.said()
    ended(tmp_path, 1, 3)
    by_plan: dict[int, set[float]] = {}
    for rank in range(3):
        assert [sample.plan for sample in agent.steps[rank]] == [1] * 6 + [2] * 8 + [3] * 10
        for sample in agent.steps[rank]:
            by_plan.setdefault(sample.plan, set()).add(round(sample.strategy_metrics["compression"], 2))
    assert set(by_plan) == {1, 2, 3}
    assert max(by_plan[3]) == 1.0
    assert {round(one) for one in by_plan[2]} <= {0, 1}
    told = [MeasuredCosts.model_validate_json(body) for _, body in agent.asked]
    assert told
    assert sum(row[0] for row in told[0].tensors) == 4
    assert sum(row[1] for row in told[0].tensors) == 4 * (20 * 64 + 64 + 64 * 4 + 4)


def test_a_plan_of_another_model_changes_nothing_and_is_told(start: Start, tmp_path: Path) -> None:
    with agent_of("compressed", tmp_path, 2, start=start, **LARGEST) as agent:
        agent.params = {"ways": ["none"], "groups": [[7, 0]]}
        agent.start_workers("compressed_train.py", str(tmp_path))
        assert agent.exit_codes() == [0, 0], agent.said()
    assert any("a plan groups 7 tensors, and the model has 4" in notice.text for notice in agent.notices)


@pytest.mark.parametrize(("stage", "way"), [(1, "device/device/indivisible"), (2, "cpu/device/divisible")])
def test_a_rank_killed_in_an_exchange_costs_one_step_and_its_residual_goes_on(
    start: Start, tmp_path: Path, stage: int, way: str
) -> None:
    """1. Rank 1 is killed before it sends in step 5. 2. The other saves what it has and ends with 75. 3. The next run
    goes on from there; every sample counted once."""
    params = {"ways": [way], "groups": [[4, 0]]}
    with agent_of("compressed", tmp_path, 2, start=start, **LARGEST) as agent:
        agent.params = params
        agent.start_workers("compressed_train.py", str(tmp_path), "--fault", f"5:{stage}:die")
        assert agent.exit_codes() == [75, -9], agent.said()
    with agent_of("compressed", tmp_path, 2, start=start, run=2, **LARGEST) as agent:
        agent.params = params
        agent.start_workers("compressed_train.py", str(tmp_path))
        assert agent.exit_codes() == [0, 0], agent.said()
        assert agent.said().count("resumes from step 5\n") == 2
    ended(tmp_path, 2, 2)
    trained: Counter[tuple[int, int]] = Counter()
    for path in tmp_path.glob("run-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            trained.update((line["step"] // 8, sample) for sample in line["samples"])
    assert trained == Counter((epoch, sample) for epoch in range(2) for sample in range(96))


@pytest.mark.parametrize(
    ("fault", "way"),
    [("5:1:die behind", "device/device/indivisible"), ("5:2:die behind", "cpu/cpu/divisible")],
    ids=["everybody's", "served"],
)
def test_a_rank_killed_between_two_messages_leaves_the_others_with_what_they_have(
    start: Start, tmp_path: Path, fault: str, way: str
) -> None:
    """1. In step 5 rank 1 of three sends to rank 0 and is killed before it sends to rank 2: rank 0 makes the step, and
    rank 2 cannot. 2. The next run resumes from step 6, with what both had left out; rank 1's is lost, and told."""
    params = {"ways": [way], "groups": [[4, 0]]}
    with agent_of("compressed", tmp_path, 3, start=start, **LARGEST) as agent:
        agent.params = params
        agent.start_workers("compressed_train.py", str(tmp_path), "--fault", fault)
        assert agent.exit_codes() == [75, -9, 75], agent.said()
    with agent_of("compressed", tmp_path, 3, start=start, run=2, **LARGEST) as agent:
        agent.params = params
        agent.start_workers("compressed_train.py", str(tmp_path))
        assert agent.exit_codes() == [0] * 3, agent.said()
        assert agent.said().count("resumes from step 6\n") == 3
    lost = [notice.text for notice in agent.notices if "is lost" in notice.text]
    assert lost == ["the residual of rank 1 of run 1 is lost with its machine; training continues"]
    ended(tmp_path, 2, 3)


@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_what_was_left_out_is_handed_over_once_to_more_and_to_fewer_workers(
    start: Start, tmp_path: Path, memory: bool
) -> None:
    """1. Two workers train; they are stopped in step 6, or all machines lose power once it is in memory. 2. Three go
    on (from disk), then one, which puts what the others left out into its first gradients, then two. 3. Gradients do
    not depend on the weights: what all weights moved and what all ranks keep at the end are what an undisturbed run's
    are together. One worker lost what the others had left out; so did who went on from memory."""
    linear = ("--linear", "--epochs", "3")
    arguments = (str(tmp_path), *linear)
    undisturbed("compressed", tmp_path / "undisturbed", start, *linear, **LARGEST)
    world_sizes = (2, 1, 2) if memory else (2, 3, 1, 2)
    for run, world_size in enumerate(world_sizes, start=1):
        with agent_of("compressed", tmp_path, world_size, start=start, run=run, **LARGEST) as agent:
            agent.own_directories, agent.memory = memory, tmp_path / "memory" if memory else None
            agent.spec.checkpoint.memory_replicas = world_size if memory else 0
            agent.place([f"node-{rank}" for rank in range(world_size)], ["here"] * world_size)
            if run == len(world_sizes):
                agent.start_workers("compressed_train.py", *arguments)
                assert agent.exit_codes() == [0] * world_size, agent.said()
            elif memory:
                agent.start_workers("compressed_train.py", *arguments, "--hold-at", str(8 * run))
                agent.lose_power(8 * run - 2)
            else:
                agent.start_workers("compressed_train.py", *arguments, "--await-stop-at", str(6 * run))
                agent.send_stop_in(6 * run, 0)
                assert agent.exit_codes() == [85] * world_size, agent.said()
            assert not memory or agent.said().count(", from memory") == sum(world_sizes[1:run])
    whole = sums(tmp_path / "undisturbed", 1, 2)
    handed = sums(tmp_path, len(world_sizes), 2)
    torch.testing.assert_close(handed, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_sizes", [(2, 1, 2), (2, 2, 2)], ids=["fewer", "as many"])
def test_a_stop_at_an_epochs_end_changes_nothing_of_what_was_left_out(
    start: Start, tmp_path: Path, world_sizes: tuple[int, ...]
) -> None:
    """1. Two workers are stopped at the end of an epoch, of eight steps. 2. One or two go on, and are shown the batch
    that led there once more: nothing of that pass counts, also not in what they put into or keep of their gradients.
    3. Two end. As many, with momentum, end with the bits of an undisturbed run."""
    alike = len(set(world_sizes)) == 1
    linear, settings = ("--linear", "--epochs", "3"), {**LARGEST, "momentum": 0.9 if alike else 0.0}
    undisturbed("compressed", tmp_path / "undisturbed", start, *linear, **settings)
    for run, world_size in enumerate(world_sizes, start=1):
        with agent_of("compressed", tmp_path, world_size, start=start, run=run, **settings) as agent:
            last = run == len(world_sizes)
            stop_at = () if last else ("--await-stop-at", str(8 * run - 1))
            agent.start_workers("compressed_train.py", str(tmp_path), *linear, *stop_at)
            if not last:
                agent.send_stop_in(8 * run - 1, 0)
            assert agent.exit_codes() == [0 if last else 85] * world_size, agent.said()
            assert last or agent.checkpoint_step == 8 * run
    if alike:
        assert equal(ended(tmp_path, len(world_sizes), 2), ended(tmp_path / "undisturbed", 1, 2))
    handed, whole = sums(tmp_path, len(world_sizes), 2), sums(tmp_path / "undisturbed", 1, 2)
    torch.testing.assert_close(handed, whole, rtol=1e-4, atol=1e-4)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sums(out: Path, run: int, world_size: int) -> Tensors:
    """Weights as if all that was left out had been sent."""
    weights = dict(ended(out, run, world_size))
    for rank in range(world_size):
        if (path := out / f"run-{run}-rank-{rank}.left").exists():
            for name, left in torch.load(path, weights_only=True).items():
                weights[name] = weights[name] - left.view(weights[name].shape)
    return weights


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("3:1:too much", "of which no message has more than"),
        ("3:1:outside", "its indices do not ascend, or reach beyond the last of"),
    ],
)
def test_a_peer_that_lies_ends_the_run_with_a_clear_error(start: Start, tmp_path: Path, fault: str, says: str) -> None:
    """Rank 1 sends what cannot be. Rank 0 says so and ends; rank 1 loses its peer. Nobody waits for ever."""
    with agent_of("compressed", tmp_path, 2, start=start, **LARGEST) as agent:
        agent.start_workers("compressed_train.py", str(tmp_path), "--fault", fault)
        assert agent.exit_codes() == [1, 75], agent.said()
        assert re.search(f"rank 1 sent a message that cannot be: .*{says}", agent.said()), agent.said()


@pytest.mark.parametrize(("value", "way"), [("nan", "device/device/indivisible"), ("inf", "cpu/cpu/divisible")])
def test_what_is_not_finite_arrives_on_all_ranks_in_the_same_step_and_harms_no_residual(
    start: Start, tmp_path: Path, value: str, way: str
) -> None:
    """Rank 1's gradient has one such entry in step 4. The script sees that one on each rank, mends it there, and goes
    on with finite weights."""
    with agent_of("compressed", tmp_path, 2, start=start, **LARGEST) as agent:
        agent.params = {"ways": [way], "groups": [[4, 0]]}
        agent.start_workers("compressed_train.py", str(tmp_path), "--bad", f"4:{value}")
        assert agent.exit_codes() == [0, 0], agent.said()
    assert all(one.isfinite().all() for one in ended(tmp_path, 1, 2).values())
    for rank in range(2):
        left = torch.load(tmp_path / f"run-1-rank-{rank}.left", weights_only=True)
        assert all(one.isfinite().all() for one in left.values())
