"""Gradients that add up over several batches and are exchanged once. Real worker processes; each test is a story."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from zmq_agent import FakeAgent, Start, torchrun_like

from atoll.controller.estimators.noise import NoiseEstimator
from atoll.step_estimators.sums import norms_of
from atoll.step_estimators.wire import step_from_wire

pytestmark = pytest.mark.timeout(240)

SCRIPT = "accumulation.py"
UPDATES, BATCHES = 6, 38  # in two epochs of 18 batches and a short one: groups of 8, 8 and 3
EXACT = {"sparsity": 0.0, "staleness": 0, "values": "float32", "digest_every": 1, "momentum": "as-is"}
FIRST, SECOND = (5.0, 2.0), (1.0, 3.0)
Line = dict[str, Any]


def lines(out: Path, rank: int) -> list[Line]:
    by_step: dict[int, Line] = {}
    for log in sorted(out.glob(f"run-*-rank-{rank}.jsonl")):
        by_step.update({line["step"]: line for line in map(json.loads, log.read_text().splitlines())})
    return [by_step[step] for step in sorted(by_step)]


def end(out: Path, run: int = 0, rank: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(out / f"run-{run}-rank-{rank}.end", weights_only=True)
    return state


def trained(parent: Path, how: str, *more: str, start: Start, world_size: int = 2) -> Path:
    """By hand, to the end; all ranks have the same weights."""
    out = parent / "-".join([how, str(world_size), *(one.strip("-") for one in more if one.startswith("--"))])
    out.mkdir()
    assert torchrun_like(SCRIPT, str(out), how, *more, world_size=world_size, start=start) == [0] * world_size
    for rank in range(1, world_size):
        assert all(map(torch.equal, end(out)["weights"], end(out, rank=rank)["weights"]))
    return out


def check_close(one: Path, other: Path) -> None:
    """To the order of additions."""
    torch.testing.assert_close(end(one)["weights"], end(other)["weights"], rtol=1e-3, atol=1e-5)


def test_an_accumulation_is_exchanged_once(tmp_path: Path, start: Start) -> None:
    """1. Every pass of an accumulation over eight batches reduced all gradients and agreed with all ranks; under
    run.no_sync that is done in the pass before an update alone, and waited for nowhere else. 2. The weights are those
    of a script without the word. 3. A layer that the last pass of a group does not reach has its gradient all the
    same. (tests/conformance compares both with plain torch.)"""
    every, once = (trained(tmp_path, how, "--clip", start=start) for how in ("every-pass", "no-sync"))
    of_one = lines(every, 0)[0]["reduced"]
    assert of_one > 0
    assert [line["reduced"] for line in lines(every, 0)] == [of_one] * BATCHES
    updates = [step for step in range(BATCHES) if step % 19 in (7, 15, 18)]
    for rank in range(2):
        assert [line["step"] for line in lines(once, rank) if line["reduced"] or line["agreed"]] == updates
        assert sum(line["reduced"] for line in lines(once, rank)) == UPDATES * of_one
    check_close(once, every)


@pytest.mark.parametrize(("how", "sampled"), [("every-pass", 1), ("no-sync", 4)])
def test_the_noise_of_accumulated_gradients_is_that_of_the_samples(
    tmp_path: Path, start: Start, how: str, sampled: int
) -> None:
    """1. Two unequal ranks add up four batches of 16 samples in each update of AdamW, whose noise scale is 20 samples.
    2. The agent is told of the optimizer's family and of the four batches. 3. One pass in ten steps is sampled, of the
    gradient of one batch, or of all four where none was exchanged before; the noise scale is found either way."""
    with FakeAgent(tmp_path, world_size=2, start=start) as agent:
        agent.shares = (3.0, 1.0)
        agent.start_workers("known_noise.py", how, "240")
        assert agent.exit_codes() == [0, 0], agent.said()
    assert (agent.prepared.optimizer, agent.prepared.batches_per_update) == ("adaptive", 4)
    estimator, seen = NoiseEstimator(), []
    by_step = [{one.step: one for one in agent.steps[rank]} for rank in range(2)]
    told_by_both = sorted(by_step[0].keys() & by_step[1].keys())  # a worker keeps 256 steps for an agent that is slow
    for step in told_by_both:
        both = [by_step[rank][step] for rank in range(2)]
        told = [norms_of(step_from_wire(one)) for one in both]
        if all(told):
            seen.append(both[0].sampled_batches)
        for one in filter(None, told):
            estimator.observe(step, one)
    assert set(seen) == {sampled}
    assert len(seen) == pytest.approx(len(told_by_both) / 10, abs=3)
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.noise_scale == pytest.approx(20, rel=0.2)


def test_shares_that_change_and_a_worker_killed_between_two_exchanges_leave_no_trace(
    tmp_path: Path, start: Start
) -> None:
    """1. Two unequal ranks, whose shares a plan turns round between two exchanges; the last batch is short. They train
    what one worker trains. 2. Again: rank 1 is killed (SIGKILL) in a pass that exchanges nothing; the other meets it at
    the end of the group, saves the last whole update and ends with 75. 3. They go on to the same bits."""
    alone = trained(tmp_path, "every-pass", "--adam", start=start, world_size=1)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out, run, more, codes in (
        (whole, 1, (), [0, 0]),
        (broken, 1, ("--die-at", "13"), [75, -signal.SIGKILL]),
        (broken, 2, (), [0, 0]),
    ):
        out.mkdir(exist_ok=True)
        with FakeAgent(out, run=run, world_size=2, start=start) as agent:
            agent.shares, agent.later_plans = FIRST, [agent.plan(2, 30, SECOND)]
            agent.start_workers(SCRIPT, str(out), "no-sync", "--adam", *more)
            assert agent.exit_codes() == codes, agent.said()
            if run == 1 and out == broken:
                assert agent.checkpoint_step == 8
            elif out == whole:
                assert [agent.steps[0][step].local_batch for step in (29, 30, 37)] == [9, 3, 1]
            else:
                assert agent.said().count("resumes from step 8\n") == 2
    torch.testing.assert_close(end(alone)["weights"], end(whole, 1)["weights"], rtol=1e-3, atol=1e-5)
    for rank in range(2):
        assert lines(broken, rank) == lines(whole, rank)
        assert all(map(torch.equal, end(broken, 2, rank)["weights"], end(whole, 1)["weights"]))


def test_an_overflow_that_one_rank_keeps_to_itself_is_everybodys_by_the_update(tmp_path: Path, start: Start) -> None:
    """Rank 1's gradients overflow in a pass that exchanges nothing: at the update all ranks leave it out alike."""
    well = trained(tmp_path, "no-sync", "--scaler", start=start)
    out = trained(tmp_path, "no-sync", "--scaler", "--overflow-at", "10", start=start)
    assert (end(well)["scale"], end(out)["scale"], end(out, rank=1)["scale"]) == (256.0, 128.0, 128.0)
    assert all(one.isfinite().all() for one in end(out)["weights"])


@pytest.mark.parametrize(("exchange", "rounds"), [("gradients", BATCHES), ("updates", UPDATES)])
def test_by_stale_sparse_an_accumulation_is_one_round(exchange: str, rounds: int, tmp_path: Path, start: Start) -> None:
    """By gradients each pass was a round; under run.no_sync an update is one, and so much less is sent. Where all is
    sent both train the same, by both exchanges; tests/conformance compares them with plain torch."""
    settings = ("--settings", json.dumps(EXACT | {"exchange": exchange}))
    every, once = (trained(tmp_path, how, *settings, start=start) for how in ("every-pass", "no-sync"))
    assert (end(every)["rounds"], end(once)["rounds"]) == (rounds, UPDATES)
    if exchange == "gradients":
        assert end(once)["sent_bytes"] < 0.3 * end(every)["sent_bytes"]
    check_close(once, every)


@pytest.mark.parametrize("settings", [None, EXACT, {"exchange": "gradients"}], ids=["dense", "updates", "gradients"])
def test_an_update_of_what_was_not_exchanged_is_refused_on_every_rank(
    settings: dict[str, Any] | None, tmp_path: Path, start: Start
) -> None:
    """The last pass of the group is under run.no_sync, too. Nobody waits, and nobody trains on its own part alone."""
    more = ("--settings", json.dumps(settings)) if settings is not None else ()
    with (tmp_path / "said").open("wb") as log:
        assert torchrun_like(SCRIPT, str(tmp_path), "no-last", *more, start=start, log=log) == [1, 1]
    said = "BadInput: optimizer.step() on gradients that only this worker has: the last backward pass was under"
    assert (tmp_path / "said").read_text().count(said) == 2
