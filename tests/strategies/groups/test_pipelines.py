"""Pipelines of strategy groups: real worker processes that hold a model together. Each test is a story."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduled_runs import Scheduling, groups, rounds
from zmq_agent import Start

from atoll.agent.runtime.checkpoints.disk.files import newest_valid
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.errors import exit_codes
from atoll.strategies.groups.settings import Groups

pytestmark = pytest.mark.timeout(300)


def trained(
    out: Path, world_size: int, stages: int, *arguments: str, start: Start, run: int = 1, every_steps: int = 0,
    **more: Any,
) -> Path:  # fmt: skip
    """A job of so many workers, which ends well. more: settings."""
    out.mkdir(exist_ok=True)
    settings = {"stages": stages, "grouping": "all", **more}
    agent = groups(out, world_size, start=start, run=run, **settings)
    agent.spec.checkpoint.every_steps = every_steps
    with agent, Scheduling(agent, Groups(**settings)):  # type: ignore[arg-type]
        agent.start_workers("pipeline_train.py", str(out), *arguments)
        assert agent.exit_codes() == [0] * world_size, agent.said()
    return out


def losses(out: Path, rank: int = 0, run: int = 1) -> list[float]:
    return [line["loss"] for line in rounds(out, rank, run)]


def whole(out: Path, stages: int, run: int = 1) -> dict[str, torch.Tensor]:
    """The model that the first pipeline ended with."""
    parts = [torch.load(out / f"run-{run}-rank-{rank}.end", weights_only=True) for rank in range(stages)]
    return {name: one for part in parts for name, one in part.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optimizer=sgd", "--model=real", "--augment"],
        ["--model=list", "--clip=0.5", "--recompute"],
        ["--bfloat16", "--split-at", "3"],
    ],
)
def test_two_stages_train_what_one_process_trains(start: Start, tmp_path: Path, arguments: list[str]) -> None:
    """Layers of one model on two workers, each of which made only its own: losses and weights of one process; with
    momentum or Adam, clipped over both stages, with activations computed twice, or sent in bfloat16; of samples that
    are augmented at random, too, whose inputs one stage draws and whose targets another."""
    alone = trained(tmp_path / "alone", 1, 1, *arguments, start=start)
    together = trained(tmp_path / "together", 2, 2, *arguments, start=start)
    assert losses(together) == losses(together, rank=1) == pytest.approx(losses(alone), rel=1e-5, abs=1e-5)
    assert losses(alone)[-1] < losses(alone)[0]
    expected, found = whole(alone, 1), whole(together, 2)
    assert list(found) == list(expected)
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-5)


def test_activations_are_rounded_between_islands_where_the_job_says_so(start: Start, tmp_path: Path) -> None:
    """The stages are on two islands: losses are nearly those of one process, where activations travel in 8 bits."""
    arguments = ["--batch=32", "--micro-batches=1", "--split-at", "3"]
    alone = trained(tmp_path / "alone", 1, 1, *arguments, start=start)
    rounded = trained(tmp_path / "rounded", 2, 2, *arguments, start=start, thin_links="int8")
    assert losses(rounded) == pytest.approx(losses(alone), rel=0.02)
    assert losses(rounded) != pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.parametrize("grouping", ["scheduled", "pairs"])
def test_pipelines_average_stage_by_stage_and_train_every_sample_once(
    start: Start, tmp_path: Path, grouping: Any
) -> None:
    """1. Three pipelines of two stages, cut by what their layers cost. 2. By a rule of stages and by one of pipelines
    each sample is trained once an epoch, all ranks tell the same losses, and the replicas of each stage end alike to
    the bit."""
    settings = {"stages": 2, "grouping": grouping}
    with groups(tmp_path, 6, start=start, **settings) as agent, Scheduling(agent, Groups(**settings)) as scheduling:
        agent.start_workers("pipeline_train.py", str(tmp_path), "--samples=192", "--epochs=3")
        assert agent.exit_codes() == [0] * 6, agent.said()
    told = [losses(tmp_path, rank) for rank in range(6)]
    assert all(one == told[0] for one in told)
    assert sum(told[0][-2:]) < sum(told[0][:2])  # the two rounds of an epoch show every sample
    for stage in range(2):
        states = [torch.load(tmp_path / f"run-1-rank-{rank}.end", weights_only=True) for rank in range(stage, 6, 2)]
        for state in states[1:]:
            assert all(torch.equal(one, state[name]) for name, one in states[0].items())
    for stage in range(2):  # both ends of a pipeline fetch its samples: the first inputs, the last targets
        assert counted(tmp_path, [(1, rank) for rank in range(stage, 6, 2)]) == dict.fromkeys(range(192), 3)
    assert all({rank % 2 for rank in answer.members} in ({0}, {1}) for answer in scheduling.groups)


def counted(out: Path, workers: list[tuple[int, int]]) -> Counter[int]:
    """How often these, (run, rank), fetched each sample of rounds that ended."""
    return Counter(index for run, rank in workers for line in rounds(out, rank, run) for index in line["samples"])


def test_a_checkpoint_of_stages_is_one_model_for_any_number_of_them(start: Start, tmp_path: Path) -> None:
    """1. Two stages train an epoch with a checkpoint at each round, whose shards make one state dict. 2. One process
    goes on for another epoch, 3. then three stages, 4. then two pipelines of two. Losses of the first three are those
    of one process that trained all along."""
    alone = trained(tmp_path / "alone", 1, 1, "--epochs=3", start=start)
    out = tmp_path / "stages"
    for run, (workers, stages) in enumerate([(2, 2), (1, 1), (3, 3), (4, 2)], start=1):
        trained(out, workers, stages, f"--epochs={run}", start=start, run=run, every_steps=1)
    shown_again = 1  # the last round of the epoch before
    found = [*losses(out), *(loss for run in (2, 3) for loss in losses(out, run=run)[shown_again:])]
    assert found == pytest.approx(losses(alone), rel=1e-5, abs=1e-5)
    assert losses(out, run=4)[-1] < losses(out)[0]
    saved = newest_valid(out / "job", lambda why: None)
    assert saved is not None
    state = unpack_state(saved.tensors, saved.scalars)
    expected = whole(out, 2, run=4)
    assert list(state["model"]) == list(expected)
    assert all(torch.equal(state["model"][name], one) for name, one in expected.items())
    assert sorted(state["optimizer"]["state"]) == list(range(len(expected)))


def test_a_killed_stage_costs_its_round(start: Start, tmp_path: Path) -> None:
    """1. Of two pipelines of two stages one loses its second stage in round 2, in the middle of a schedule. 2. The
    others go back to the round's beginning, save that, and leave. 3. A run of one pipeline goes on from there, and
    every sample counts once."""
    settings = {"stages": 2}
    with groups(tmp_path, 4, start=start, **settings) as agent, Scheduling(agent, Groups(**settings)):
        agent.start_workers("pipeline_train.py", str(tmp_path), "--die=3:2:5", "--round-batches=2")
        assert agent.exit_codes() == [75, 75, 75, -9], agent.said()
    assert [line["round"] for line in rounds(tmp_path, 0)] == [0, 1]
    trained(tmp_path, 2, 2, "--round-batches=4", start=start, run=2)
    assert rounds(tmp_path, 0, run=2)[0]["round"] == 2
    assert counted(tmp_path, [(1, 0), (1, 2), (2, 0)]) == dict.fromkeys(range(96), 2)


@pytest.mark.parametrize(("die", "broken"), [("--die=1:3:5", 3), ("--die-ahead=1:2", 2)])
def test_a_killed_stage_ends_its_pipeline_and_the_others_train_the_round_again_in_place(
    start: Start, tmp_path: Path, die: str, broken: int
) -> None:
    """1. Of three pipelines of two stages the first loses its second stage in a round: in the middle of a schedule, or
    when the round is over for two pipelines, and the third does not hear of its end. 2. The workers of the others go
    on in view 2, in their processes, from that round's beginning; who is left of the first pipeline leaves the run.
    3. Every sample counts once an epoch, the replicas of each stage end alike to the bit, and that is on disk: another
    pipeline writes it now."""
    settings = {"stages": 2}
    agent = groups(tmp_path, 6, start=start, **settings)
    agent.spec.checkpoint.every_steps = 1
    with agent, Scheduling(agent, Groups(**settings)):
        agent.makes_views = True
        agent.start_workers("pipeline_train.py", str(tmp_path), die, "--samples=192", "--split-at", "3")
        assert agent.workers[1].wait(timeout=120) == -signal.SIGKILL, agent.said()
        agent.send_view(2, [2, 3, 4, 5], [1.0] * 4, plan_id=2, to=[0, 2, 3, 4, 5])
        agent.put_in_force()
        assert agent.exit_codes() == [exit_codes.DRAINED, -signal.SIGKILL, 0, 0, 0, 0], agent.said()
    if "ahead" in die:
        assert [line["loss"] > 0 for line in rounds(tmp_path, 2) if line["round"] == broken] == [True, True]
    for stage in range(2):
        lines = [line for rank in range(stage, 6, 2) for line in rounds(tmp_path, rank)]
        whole_ones = [line for line in lines if line["view"] == 2 or line["round"] < broken]
        assert {line["round"] for line in whole_ones if line["view"] == 2} == set(range(broken, 5))
        assert Counter(index for line in whole_ones for index in line["samples"]) == dict.fromkeys(range(192), 2)
    ends = [torch.load(tmp_path / f"run-1-rank-{rank}.end", weights_only=True) for rank in (2, 3, 4, 5)]
    assert all(torch.equal(one, ends[stage + 2][name]) for stage in range(2) for name, one in ends[stage].items())
    saved = newest_valid(tmp_path / "job", lambda why: None)
    assert saved is not None
    assert saved.header.step == 5
    model = unpack_state(saved.tensors, saved.scalars)["model"]
    assert all(torch.equal(model[name], one) for name, one in {**ends[0], **ends[1]}.items())


def test_what_fails_in_a_stage_is_said_by_name(start: Start, tmp_path: Path) -> None:
    for flaw, said in (
        ("--flaw=pair", "layer 2 (Pair) gave a tuple, and a stage hands one tensor to the next"),
        ("--flaw=losses", "the loss has shape (2,); it must be one number"),
        ("--flaw=tied", "1.up.weight and 3.up.weight are one parameter, and lie in stages 0 and 1. Untie them"),
        ("--flaw=groups", "optimizer_factory gave the stages [1, 2] parameter groups"),
    ):
        out = tmp_path / flaw.strip("-")
        out.mkdir()
        with groups(out, 2, start=start, stages=2) as agent:
            agent.start_workers("pipeline_train.py", str(out), flaw, "--split-at", "2")
            assert set(agent.exit_codes()) in ({1}, {1, 75}), flaw
            assert said in agent.said()


def test_two_workers_that_claim_one_place_are_refused(start: Start, tmp_path: Path) -> None:
    """The launch has rank 0, the first stage of the first pipeline, twice, and nobody for the second stage."""
    with groups(tmp_path, 2, start=start, stages=2) as agent:
        agent.members[1].rank = 0
        agent.start_workers("pipeline_train.py", str(tmp_path))
        assert agent.exit_codes() == [1, 1], agent.said()
        assert "the launch names ranks [0, 0] of a run of 2; each once" in agent.said()
