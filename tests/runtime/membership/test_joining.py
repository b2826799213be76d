"""Workers join, replace a lost one and leave while the others train. Real processes and gloo; the test plays agent and
controller."""

from __future__ import annotations

import signal
from collections import Counter
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from in_place_runs import FIRST, folder, lines, same
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
from zmq_agent import FakeAgent, Start

from atoll.strategies.compressed.costs.measured import MeasuredCosts
from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_FAILED, VIEW_STAGE_READY, VIEW_STAGE_TRAINING

pytestmark = pytest.mark.timeout(240)

KILLED = -signal.SIGKILL
SAMPLES = 100


def check_samples_once(out: Path, ranks: int, epochs: int) -> None:
    """By the newest view of each step."""
    all_lines = [line for rank in range(ranks) for line in lines(out, rank)]
    newest: dict[int, int] = {}
    for line in all_lines:
        newest[line["step"]] = max(newest.get(line["step"], 0), line["view"])
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for line in all_lines:
        if line["view"] == newest[line["step"]]:
            seen[line["epoch"]].update(line["ids"])
    assert seen == {epoch: Counter(range(SAMPLES)) for epoch in range(epochs)}


def test_a_worker_joins_at_a_boundary_and_another_leaves_at_one(tmp_path: Path, start: Start) -> None:
    """1. Two workers train; a third starts beside them, says that it is ready, and is taken in by a view that all
    propose in their agreement: no collective is aborted. 2. It has the others' state, at their step. 3. Rank 0 is left
    out by a later view: it leaves at the boundary with exit code 85; the others go on to the end, with equal bits. 4.
    Each sample counts once."""
    out = folder(tmp_path, "out")
    with FakeAgent(out, world_size=2, start=start) as agent:
        agent.shares, agent.makes_views = (6.0, 6.0), True
        arguments = (str(out), "--per-batch", "--scaler", "--epochs", "60", "--sleep-s", "0.01")
        agent.start_workers("in_place.py", *arguments, "--await-view-at", "200")
        agent.wait_for_step(3)
        joined = agent.start_joiner("in_place.py", *arguments)
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        assert all(agent.stands[rank][-1].takes_in for rank in (0, 1))
        agent.send_view(2, [0, 1, joined], FIRST, plan_id=2, without_state=[joined], at_boundary=True)
        agent.put_in_force()
        assert VIEW_STAGE_BROKEN not in [one.stage for rank in (0, 1) for one in agent.stands[rank]]
        here = agent.alive[joined][0]
        agent.wait_until(lambda: agent.alive[joined][0] > here + 3)
        agent.send_view(3, [1, joined], [1.0, 1.0], plan_id=3, at_boundary=True, in_force=2, to=[0, 1, joined])
        assert agent.workers[0].wait(timeout=60) == 85, agent.said()
        agent._view_to = (1, joined)
        agent.put_in_force()
        assert agent.exit_codes(90) == [85, 0, 0], agent.said()
    states = [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in (1, joined)]
    assert same(states[0], states[1])
    check_samples_once(out, 3, 60)


def test_a_worker_joins_at_the_very_end_of_an_epoch(tmp_path: Path, start: Start) -> None:
    """1. Two workers have made an epoch's last update when a view with a third one comes, for which they do not wait
    until a boundary that suits. 2. All three begin the next epoch together: the third has nothing to do in the one
    before. 3. Each sample counts once, and all end with the same weights."""
    out = folder(tmp_path, "out")
    with FakeAgent(out, world_size=2, start=start) as agent:
        agent.shares, agent.makes_views = (6.0, 6.0), True
        arguments = (str(out), "--epochs", "3", "--per-batch")
        agent.start_workers("in_place.py", *arguments, "--await-view-at", "8")
        agent.wait_for_step(8)
        joined = agent.start_joiner("in_place.py", *arguments)
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        agent.send_view(2, [0, 1, joined], FIRST, plan_id=2, without_state=[joined])
        agent.put_in_force()
        assert agent.exit_codes(90) == [0, 0, 0], agent.said()
    assert {line["epoch"] for line in lines(out, joined)} == {1, 2}
    states = [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1, joined)]
    assert same(states[0], states[1])
    assert same(states[0], states[2])
    check_samples_once(out, 3, 3)


def test_a_lost_worker_is_replaced_and_no_bit_is_another(tmp_path: Path, start: Start) -> None:
    """1. Of three workers one dies (SIGKILL). The others stand still: the job wants three. 2. One starts in its stead,
    is ready, and is in the next view, in the place of the lost one. 3. The broken step is trained again by three; at
    the end weights, moments, schedulers, averages and the scaler have the bits of a run that nobody disturbed."""
    arguments = ("--per-batch", "--scaler")
    calm, struck = folder(tmp_path, "calm"), folder(tmp_path, "struck")
    with FakeAgent(calm, world_size=3, start=start) as agent:
        agent.shares = FIRST
        agent.start_workers("in_place.py", str(calm), *arguments)
        assert agent.exit_codes(90) == [0, 0, 0], agent.said()
    with FakeAgent(struck, world_size=3, start=start) as agent:
        agent.shares, agent.makes_views = FIRST, True
        agent.start_workers("in_place.py", str(struck), "--kill-rank", "1", "--kill-step", "13", "--kill-at",
                            "backward", *arguments)  # fmt: skip
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        joined = agent.start_joiner("in_place.py", str(struck), *arguments)
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        agent.send_view(2, [0, joined, 2], FIRST, plan_id=2, without_state=[joined])
        agent.put_in_force()
        assert agent.exit_codes(90) == [0, KILLED, 0, 0], agent.said()
        assert agent.stands[joined][-1].stage == VIEW_STAGE_TRAINING
    for rank, before in ((0, 0), (joined, 1), (2, 2)):
        now = torch.load(struck / f"rank-{rank}.pt", weights_only=True)
        then = torch.load(calm / f"rank-{before}.pt", weights_only=True)
        assert same(now, then)
    check_samples_once(struck, 4, 3)


KEEPERS: dict[str, dict[str, Any]] = {
    "updates": {"strategy": "stale-sparse", "sparsity": 0.9, "values": "float32", "digest_every": 3},
    "gradients": {"strategy": "stale-sparse", "sparsity": 0.9, "exchange": "gradients", "digest_every": 3},
    "local-steps": {"strategy": "local-steps", "density": 0.2, "values": "float32", "digest_every": 3},
    "compressed": {"strategy": "compressed", "algorithm": "dgc", "density": 0.1, "min_bytes": 0},
}


def taken_in(agent: FakeAgent, *arguments: str) -> int:
    """Two workers train, and a third is in their next view, which they leave for at a boundary, each with what it has
    not sent. Returns the third's rank."""
    agent.makes_views = True
    agent.start_workers("stale_train.py", *arguments, "--await-view-at", "40", "--awaited-view", "2")
    agent.wait_for_step(3)
    joined = agent.start_joiner("stale_train.py", *arguments)
    agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
    agent.send_view(2, [0, 1, joined], FIRST, plan_id=2, without_state=[joined], at_boundary=True, keeps_unsent=True)
    return joined


@pytest.mark.parametrize(("name", "keeps_unsent"), [*zip(KEEPERS, repeat(False)), *zip(KEEPERS, repeat(True))])
def test_what_was_not_sent_yet_stays_with_who_had_state(
    tmp_path: Path, start: Start, name: str, keeps_unsent: bool
) -> None:
    """1. Two workers send a tenth of what they learn; a third is taken in at a boundary, with the shared parameters,
    and they keep what they had not sent. 2. Rank 0 is left out at a later one, and hands over what it had; the others
    save, are stopped, and a second run goes on from their disks. 3. Weights are equal, each sample counts once, and
    what the shared parameters moved and what is still to be sent are all gradients that there were: of the one that
    left, of the one that came, and of both runs. Where its link is too thin for that, rank 0 takes along what it had
    not sent, and the rest holds."""
    settings = KEEPERS[name]
    with sparse(tmp_path, 2, start=start, **settings) as agent:
        joined = taken_in(agent, str(tmp_path), "--epochs", "600", "--sleep-s", "0.01")
        agent.put_in_force()
        here = agent.alive[joined][0]
        agent.wait_until(lambda: agent.alive[joined][0] > here + 3)
        agent.send_view(3, [1, joined], [1.0, 1.0], plan_id=3, at_boundary=True, in_force=2, to=[0, 1, joined],
                        keeps_unsent=keeps_unsent)  # fmt: skip
        assert agent.workers[0].wait(timeout=60) == 85, agent.said()
        agent._view_to = (1, joined)
        agent.put_in_force()
        here = agent.alive[joined][0]
        agent.wait_until(lambda: agent.alive[joined][0] > here + 3)
        agent.send_stop(1)
        assert agent.exit_codes(90) == [85, 85, 85], agent.said()
        assert VIEW_STAGE_BROKEN not in [one.stage for said in agent.stands.values() for one in said]
    epochs = 1 + max(line["epoch"] for line in trained(tmp_path))
    with sparse(tmp_path, 2, start=start, run=2, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", str(epochs))
        assert agent.exit_codes() == [0, 0], agent.said()
    check_every_sample_once(tmp_path, epochs)
    first = [kept(tmp_path, 1, rank, "end") for rank in (0, 1, joined)]
    last = [kept(tmp_path, 2, rank, "end") for rank in (0, 1)]
    unsent = [*last, first[0]] if keeps_unsent else last
    assert not keeps_unsent or any(one.abs().max() > 0 for one in first[0]["residuals"].values())
    check_nothing_was_lost(
        kept(tmp_path, 1, 0, "begin")["shared_params"],
        check_alike(last, "shared_params"),
        together([*first, *last], "summed"),
        left(unsent),
        "gradients" if name in ("gradients", "compressed") else "updates",
    )


@pytest.mark.parametrize(("name", "where"), [*zip(KEEPERS, repeat("starting")), ("updates", "building")])
def test_a_joiner_that_dies_while_it_is_taken_in_takes_nothing_along(
    tmp_path: Path, start: Start, name: str, where: str
) -> None:
    """1. Two workers send a tenth of what they learn; a third is taken in at a boundary, and they keep what they had
    not sent. It gets SIGKILL when it has the state and begins the view with them. 2. The two go on without it in the
    same processes to the end: each sample counts once, weights are equal, and no gradient is lost."""
    with sparse(tmp_path, 2, start=start, **KEEPERS[name]) as agent:
        joined = taken_in(agent, str(tmp_path), "--epochs", "12", "--sleep-s", "0.01", "--die-in-view", where)
        assert joined == 2  # who dies
        agent.wait_for_stage(2, VIEW_STAGE_FAILED, 0, 1)
        agent.send_view(3, [0, 1], [1.0, 1.0], plan_id=3)
        agent.put_in_force()
        assert agent.exit_codes(90) == [0, 0, KILLED], agent.said()
    check_every_sample_once(tmp_path, 12)
    ended = [kept(tmp_path, 1, rank, "end") for rank in (0, 1)]
    check_nothing_was_lost(
        kept(tmp_path, 1, 0, "begin")["shared_params"],
        check_alike(ended, "shared_params"),
        together(ended, "summed"),
        left(ended),
        "gradients" if name in ("gradients", "compressed") else "updates",
    )


def test_links_that_stay_in_a_view_are_not_measured_again(tmp_path: Path, start: Start) -> None:
    """1. Two workers have measured their links and tell it. 2. A third is taken in: it exchanges with one of them, and
    all three tell the same, nothing sooner than before. 3. Rank 0 is left out: the others tell the very same link, and
    all-reduces as of two."""
    with sparse(tmp_path, 2, start=start, **KEEPERS["compressed"]) as agent:
        agent.makes_views = True
        arguments = (str(tmp_path), "--epochs", "60", "--sleep-s", "0.1")
        agent.start_workers("stale_train.py", *arguments)
        agent.wait_for_step(1)
        joined = agent.start_joiner("stale_train.py", *arguments)
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        agent.wait_until(lambda: {0, 1} <= told_links(agent).keys())
        before = told_links(agent)
        agent.asked.clear()
        agent.send_view(2, [0, 1, joined], FIRST, plan_id=2, without_state=[joined], at_boundary=True)
        agent.put_in_force()
        agent.wait_until(lambda: {0, 1, joined} <= told_links(agent, workers=3).keys())
        of_three = told_links(agent, workers=3)
        agent.asked.clear()
        agent.send_view(3, [1, joined], [1.0, 1.0], plan_id=3, at_boundary=True, in_force=2, to=[0, 1, joined])
        assert agent.workers[0].wait(timeout=60) == 85, agent.said()
        agent._view_to = (1, joined)
        agent.put_in_force()
        agent.wait_until(lambda: {1, joined} <= told_links(agent, workers=2).keys())
        of_two = told_links(agent, workers=2)
        agent.send_stop(1)
        assert agent.exit_codes(90) == [85, 85, 85], agent.said()
    (three,) = set(of_three.values())
    (two,) = {of_two[rank] for rank in (1, joined)}
    least = [min(before[rank][place] for rank in (0, 1)) for place in range(4)]
    assert all(now >= then for now, then in zip(three[:2], least[:2], strict=True))
    slower = three[1] / least[1] if least[1] else 1.0  # the model is so small that it may not show
    assert three[2:] == pytest.approx((2 * least[2], 4 / 3 * slower * least[3]))
    assert two[:2] == three[:2]
    assert two[2:] == pytest.approx((least[2], slower * least[3]))


def told_links(agent: FakeAgent, workers: int = 2) -> dict[int, tuple[float, ...]]:
    """The newest that each rank told of a view of so many."""
    told = ((rank, MeasuredCosts.model_validate_json(body)) for rank, body in list(agent.asked))
    return {rank: (*one.link, *one.allreduce) for rank, one in told if one.workers == workers}
