"""A worker is lost, and the others go on in place. Real processes, gloo and SIGKILL; the test plays agent and
controller.

What is compared with: the same loss, after which the survivors end and a second run begins with their checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from in_place_runs import FIRST, folder, lines, same
from zmq_agent import FakeAgent, Start

from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_TRAINING

pytestmark = pytest.mark.timeout(240)

BATCHES, SAMPLES = 9, 100  # of an epoch


def survivors(lost: int) -> list[int]:
    return [rank for rank in range(3) if rank != lost]


def shares_of(lost: int) -> list[float]:
    return [FIRST[rank] for rank in survivors(lost)]


def go_on_in_place(out: Path, start: Start, lost: int, *arguments: str) -> FakeAgent:
    """Returns the agent, for what it heard."""
    with FakeAgent(out, world_size=3, start=start) as agent:
        agent.shares, agent.makes_views = FIRST, True
        agent.start_workers("in_place.py", str(out), *arguments)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, *survivors(lost))
        agent.send_view(2, survivors(lost), shares_of(lost), plan_id=2)
        agent.put_in_force()
        codes = agent.exit_codes(90)
        assert [codes[rank] for rank in survivors(lost)] == [0, 0], agent.said()
    return agent


def start_again(out: Path, start: Start, lost: int, *arguments: str) -> None:
    with FakeAgent(out, world_size=3, start=start) as agent:
        agent.shares = FIRST
        agent.start_workers("in_place.py", str(out), *arguments)
        codes = agent.exit_codes(90)
        assert [codes[rank] for rank in survivors(lost)] == [75, 75], agent.said()
    with FakeAgent(out, run=2, world_size=2, start=start) as agent:
        agent.shares = shares_of(lost)
        agent.start_workers("in_place.py", str(out), *arguments, "--kill-at", "never")
        assert agent.exit_codes(90) == [0, 0], agent.said()


def check(in_place: Path, again: Path, lost: int, epochs: int = 3) -> None:
    """The survivors ended with the same bits as those that started again, and each sample counted once an epoch."""
    for position, rank in enumerate(survivors(lost)):
        own = torch.load(in_place / f"rank-{rank}.pt", weights_only=True)
        theirs = torch.load(again / f"rank-{position}.pt", weights_only=True)
        for name in own:
            assert name == "recompiled" or same(own[name], theirs[name]), name
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    views = {line["step"]: line["view"] for line in lines(in_place, survivors(lost)[0])}
    for rank in range(3):
        for line in lines(in_place, rank):
            if line["view"] == views[line["step"]]:
                seen[line["epoch"]].update(line["ids"])
    assert seen == {epoch: Counter(range(SAMPLES)) for epoch in range(epochs)}


CASES: Sequence[tuple[str, int, tuple[str, ...]]] = [
    ("backward", 0, ("--per-batch", "--scaler")),
    ("update", 2, ("--own-backward",)),
    ("between", 1, ("--per-batch",)),
    ("backward", 1, ("--accumulate", "3", "--no-sync", "--per-batch", "--scaler")),
    ("forward", 0, ("--two", "--per-batch")),
]


@pytest.mark.parametrize(
    ("where", "lost", "more"), CASES, ids=lambda one: "-".join(one) if isinstance(one, tuple) else str(one)
)
def test_survivors_go_on_with_the_same_bits(
    where: str, lost: int, more: tuple[str, ...], tmp_path: Path, start: Start
) -> None:
    """1. Of three workers one dies (SIGKILL) in a forward or a backward pass, before its update or after it. 2. The
    others hear of the next view and go on in the same process: the script sees one batch more. 3. Weights, moments,
    schedulers, averages and the scaler have the bits of a run that ended and began again; samples count once."""
    arguments = ("--kill-rank", str(lost), "--kill-step", str(BATCHES + 4), "--kill-at", where, *more)
    in_place, again = folder(tmp_path, "in-place"), folder(tmp_path, "again")
    agent = go_on_in_place(in_place, start, lost, *arguments)
    start_again(again, start, lost, *arguments)
    check(in_place, again, lost)
    for rank in survivors(lost):
        assert agent.stands[rank][-1].stage == VIEW_STAGE_TRAINING
        assert agent.stands[rank][-1].view == 2
