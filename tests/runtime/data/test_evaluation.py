"""Evaluation by all ranks: who sees which sample, and what they bring together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from held_ports import free_port
from zmq_agent import FakeAgent, Start, torchrun_like

EVALUATED = (
    "dense",
    "compressed",
    "stale-sparse",
    "stale-sparse by gradients",
    "local-steps in turns",
    "local-steps at the shared parameters",
)
"""Of evaluated_models.py."""


def test_each_sample_is_evaluated_once_by_shares_and_all_ranks_know_what_all_found(
    tmp_path: Path, start: Start
) -> None:
    """1. Three ranks with 6:4:2 of a batch evaluate 23 samples, twice: 11, 8 and 4. 2. Gathered, they are 0 to 22 by
    rank, on every rank, of any dtype and any number each. 3. Where shapes differ in more than that, all are told.
    4. The agent knows how many epochs there are, and how far each step came in its own."""
    with FakeAgent(tmp_path, world_size=3, start=start) as agent:
        agent.shares = (6.0, 4.0, 2.0)
        agent.start_workers("evaluated.py", str(tmp_path))
        assert agent.exit_codes() == [0, 0, 0], agent.said()
        assert agent.prepared.epochs == 2
        assert [(sample.epoch, sample.consumed) for sample in agent.steps[0]] == [
            (epoch, consumed) for epoch in (0, 1) for consumed in (12, 24, 36)
        ]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]
    assert {one["job"] for one in found} == {"tiny-test"}
    numbers = list(range(23))
    assert [one["seen"] for one in found] == [[numbers[:11]] * 2, [numbers[11:19]] * 2, [numbers[19:]] * 2]
    for one in found:
        assert one["told"][:2] == [[numbers, 23.0, [0.0, 1.0, 2.0]]] * 2
        assert "all of them give one dtype and one shape but for n" in one["told"][2]


@pytest.mark.timeout(300)
def test_all_ranks_evaluate_the_model_of_the_checkpoint_and_training_goes_on_as_without(
    tmp_path: Path, start: Start
) -> None:
    """A script evaluated each rank's own weights under local-steps: nothing had said that it must call run.synchronize
    first, which changes what is trained. Six strategies and settings; the script says what holds. A run of three
    below has local-steps."""
    ports, strategies = ",".join(str(free_port()) for _ in range(13)), ",".join(EVALUATED)
    with (tmp_path / "log").open("wb") as log:
        codes = torchrun_like("evaluated_models.py", ports, str(tmp_path), strategies, start=start, log=log)
    assert codes == [0, 0], (tmp_path / "log").read_text()


@pytest.mark.timeout(300)
def test_an_island_of_several_workers_evaluates_the_same_model(tmp_path: Path, start: Start) -> None:
    ports = ",".join(str(free_port()) for _ in range(5))
    islands = ("west", "west", "east")
    arguments = (ports, str(tmp_path), "local-steps")
    with (tmp_path / "log").open("wb") as log:
        codes = torchrun_like("evaluated_models.py", *arguments, world_size=3, islands=islands, start=start, log=log)
    assert codes == [0, 0, 0], (tmp_path / "log").read_text()


@pytest.mark.parametrize("strategy", ["dense", "local-steps"])
@pytest.mark.parametrize(("calls", "named"), [("sum", "run.sum"), ("evaluation", "iterates run.evaluation_loader")])
def test_a_call_that_one_rank_makes_alone_ends_the_run_with_its_name(
    tmp_path: Path, start: Start, strategy: str, calls: str, named: str
) -> None:
    """Under `if run.is_main:` it waited for 300 s, in a collective that the others were not in."""
    arguments = (str(free_port()), str(tmp_path), strategy, calls)
    with (tmp_path / "log").open("wb") as log:
        codes = torchrun_like("evaluated_models.py", *arguments, start=start, log=log, deadline_s=60)
    said = (tmp_path / "log").read_text()
    assert re.search(rf"BadInput: ranks are out of step: .* is at .*{re.escape(named)}.*`if run\.is_main:`", said), said
    assert codes in ([1, 1], [1, 75])  # who is not in time to hear it has lost a peer
