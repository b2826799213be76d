"""Whole runs of strategy zen: real worker processes, their own sockets between them. Each test is a story."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from held_ports import free_port
from strategy_runs import Tensors, agent_of, ended, undisturbed
from zmq_agent import FakeAgent, Start, torchrun_like

pytestmark = pytest.mark.timeout(300)
Calm = Callable[..., Tensors]


def test_it_trains_what_dense_trains_and_what_one_process_trains(start: Start) -> None:
    """Four ranks on three islands. 1. Sparse gradients of Embedding and EmbeddingBag by SparseAdam, and clipped: the
    weights are those of one process that trains the whole batch. 2. By each scheme the weights are those of strategy
    dense."""
    islands, ports = ("a", "a", "b", "c"), ",".join(str(free_port()) for _ in range(12))
    assert torchrun_like("zen_equals_dense.py", ports, world_size=4, islands=islands, start=start) == [0] * 4


def test_places_and_shares_of_the_launch_are_used_and_every_step_is_told(start: Start, tmp_path: Path) -> None:
    """Two islands of two nodes each, unequal shares that change on the way. Ranks end with the same weights;
    leaders alone speak between islands; each step tells how dense the table's gradient was, and what was sent."""
    with agent_of("zen", tmp_path, 4, start=start) as agent:
        agent.place(["a", "a", "b", "c"], ["west", "west", "east", "east"])
        agent.shares = (1.0, 2.0, 1.0, 1.0)
        agent.later_plans = [agent.plan(2, 10, (3.0, 1.0, 1.0, 0.001))]
        agent.start_workers("zen_train.py", str(tmp_path))
        assert agent.exit_codes() == [0] * 4, agent.said()
    ended(tmp_path, 1, 4)
    for rank in range(4):
        samples = agent.steps[rank]
        assert [(sample.step, sample.plan) for sample in samples] == [(step, 1 + (step >= 10)) for step in range(16)]
        for sample in samples:
            told = sample.strategy_metrics
            assert 0 <= told["density"] <= told["density_of_all"] <= 60 / 400
            assert told["density_of_all"] > 0
            assert told["sent_bytes"] > 0
        assert all(link.received_bytes > 0 and not link.dropped for link in agent.links[rank].values())
    assert {rank: set(links) for rank, links in agent.links.items()} == {0: {1, 2}, 1: {0}, 2: {0, 3}, 3: {2}}


def test_a_rank_killed_in_a_pull_costs_one_step(start: Start, tmp_path: Path, calm: Calm) -> None:
    """1. Rank 1 is killed before it sends in step 5. 2. The other notices by its closed connection, saves what it has
    and ends with 75. 3. The next run goes on from there, SparseAdam's moments too: its weights are those of a run that
    nobody disturbed, bit for bit, and every sample counted once."""
    expected = calm()
    with agent_of("zen", tmp_path, 2, start=start, scheme="zen") as agent:
        agent.start_workers("zen_train.py", str(tmp_path), "--fault", "5:3:die")
        assert agent.exit_codes() == [75, -9], agent.said()
    with agent_of("zen", tmp_path, 2, start=start, run=2, scheme="zen") as agent:
        agent.start_workers("zen_train.py", str(tmp_path))
        assert agent.exit_codes() == [0, 0], agent.said()
        assert agent.said().count("resumes from step 5\n") == 2
    weights = ended(tmp_path, 2, 2)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    trained: Counter[tuple[int, int]] = Counter()
    for path in tmp_path.glob("run-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            trained.update((line["step"] // 8, sample) for sample in line["samples"])
    assert trained == Counter((epoch, sample) for epoch in range(2) for sample in range(96))


@pytest.mark.parametrize(
    ("fault", "goes_on_from"), [("5:2:die between", 5), ("5:3:die behind", 6)], ids=["push", "pull"]
)
def test_a_rank_killed_between_two_messages_leaves_the_others_with_what_they_have(
    start: Start, tmp_path: Path, calm: Calm, fault: str, goes_on_from: int
) -> None:
    """1. In step 5 rank 1 of three sends to rank 0 and is killed before it sends to rank 2. 2. What rank 0 got of a
    push is of no use without the others' pulls. With what it got of a pull it makes the step, and rank 2 cannot. 3. The
    next run goes on from the newest that anybody has, and ends with the bits of a run that nobody disturbed."""
    expected = calm(world_size=3)
    with agent_of("zen", tmp_path, 3, start=start, scheme="zen") as agent:
        agent.start_workers("zen_train.py", str(tmp_path), "--fault", fault)
        assert agent.exit_codes() == [75, -9, 75], agent.said()
    with agent_of("zen", tmp_path, 3, start=start, run=2, scheme="zen") as agent:
        agent.start_workers("zen_train.py", str(tmp_path))
        assert agent.exit_codes() == [0] * 3, agent.said()
        assert agent.said().count(f"resumes from step {goes_on_from}\n") == 3
    weights = ended(tmp_path, 2, 3)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("3:2:too much", r"table\.weight, of which no message has more than"),
        ("3:3:partition", "of partition 77"),
    ],
)
def test_a_peer_that_lies_ends_the_run_with_a_clear_error(start: Start, tmp_path: Path, fault: str, says: str) -> None:
    """Rank 1 sends what cannot be. Rank 0 says so and ends; rank 1 loses its peer. Nobody waits for ever."""
    with agent_of("zen", tmp_path, 2, start=start, scheme="zen") as agent:
        agent.start_workers("zen_train.py", str(tmp_path), "--words", "4000", "--fault", fault)
        assert agent.exit_codes() == [1, 75], agent.said()
        assert re.search(f"rank 1 sent a message that cannot be: .*{says}", agent.said()) or re.search(
            says, agent.said()
        ), agent.said()


def test_a_gradient_that_is_dense_in_one_step_is_summed_as_one_on_all_ranks(start: Start, tmp_path: Path) -> None:
    """Rank 1's is dense in step 4: all ranks' are then, so that Adagrad does the same everywhere. It rounds
    dense gradients otherwise than sparse ones."""
    usual = undisturbed("zen", tmp_path / "sparse", start, "--turn-dense-at", "1000", scheme="zen")
    turned = undisturbed("zen", tmp_path / "turned", start, "--turn-dense-at", "4", scheme="zen")
    torch.testing.assert_close(turned, usual, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_arrives_on_all_ranks_in_the_same_step(start: Start, tmp_path: Path) -> None:
    """Rank 1's gradient has one such entry in step 4. The script sees it on each rank, and mends it there."""
    weights = undisturbed("zen", tmp_path / "spoilt", start, "--bad", "4:nan", scheme="zen")
    assert all(one.isfinite().all() for one in weights.values())


def test_dense_gradients_that_are_mostly_zero_go_the_sparse_way_once_that_was_measured(
    start: Start, tmp_path: Path
) -> None:
    """1. A table of 20,000 words, whose gradients are dense and 0.3 % of them not zero, begins the dense way. 2. Its
    density is measured in the first step; rank 0 chooses a scheme, which the job's events explain. 3. All ranks change
    over in one step, and a step sends a hundredth of what it did. 4. Rank 1's gradient has no zero in step 6: it goes
    whole, by each scheme, also where it is longer so than by an all-reduce. 5. The weights are those of strategy
    dense."""
    arguments = ("--dense", "--words", "20000", "--fill-at", "6")
    with FakeAgent(tmp_path, run=2, world_size=2, start=start) as agent:
        agent.start_workers("zen_train.py", str(tmp_path), *arguments)
        assert agent.exit_codes() == [0, 0], agent.said()
    dense = ended(tmp_path, 2, 2)
    for scheme in ("zen", "agsparse", "chosen"):
        out = tmp_path / scheme
        out.mkdir()
        settings = {} if scheme == "chosen" else {"scheme": scheme}
        with agent_of("zen", out, 2, start=start, **settings) as agent:
            agent.start_workers("zen_train.py", str(out), *arguments)
            assert agent.exit_codes() == [0, 0], agent.said()
        weights = ended(out, 1, 2)
        assert all(torch.equal(weights[name], dense[name]) for name in dense), scheme
    (notice,) = [one for one in agent.notices if one.text.startswith("gradients")]
    assert re.match(
        r"gradients of table\.weight: 0\.\d\d% of its 20000 units are in a rank's gradient and 0\.\d\d% in the sum of "
        r"2, 100% of a rank's distinct, skew 1\.0, 100 Mbit/s: \S+ takes \S+ ms, allreduce \S+ ms",
        notice.text,
    ), notice
    sent = [sample.strategy_metrics["sent_bytes"] for sample in agent.steps[0]]
    assert min(sent[:2]) > 20_000 * 8 * 4
    assert max(sent[3:6] + sent[10:]) < 0.01 * min(sent[:2])
