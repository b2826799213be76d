"""Several optimizers in one run: whole runs of real worker processes, and how their state is kept together."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zmq_agent import FakeAgent, Start, torchrun_like

from atoll.agent.runtime.checkpoints.disk.state import pack_state, unpack_state
from atoll.agent.runtime.model.as_one import as_one
from atoll.agent.runtime.model.prepared_parameters import PreparedParameters
from atoll.errors import BadInput, CheckpointError
from atoll.strategies.declaration import as_json

pytestmark = pytest.mark.timeout(240)

SCRIPT = "several_optimizers.py"
EXACT = {"sparsity": 0.0, "staleness": 0, "values": "float32", "digest_every": 1}
Line = dict[str, Any]


def folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def lines(out: Path, rank: int) -> list[Line]:
    """What a rank trained; of a step that was trained again after a resume, the last time."""
    by_step: dict[int, Line] = {}
    for log in sorted(out.glob(f"run-*-rank-{rank}.jsonl")):
        by_step.update({line["step"]: line for line in map(json.loads, log.read_text().splitlines())})
    return [by_step[step] for step in sorted(by_step)]


def end(out: Path, run: int, rank: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(out / f"run-{run}-rank-{rank}.end", weights_only=True)
    return state


def same(one: Any, other: Any) -> bool:
    """To the bit."""
    packed, others = (pack_state({"state": state}) for state in (one, other))
    return packed[1] == others[1] and all(torch.equal(packed[0][name], others[0][name]) for name in packed[0])


def in_memory(out: Path, run: int, start: Start) -> FakeAgent:
    """An agent of two machines that keep every step in memory, and no checkpoint on disk but the last."""
    agent = FakeAgent(out, run=run, world_size=2, start=start)
    agent.own_directories, agent.memory = True, out / "memory"
    agent.spec.checkpoint.memory_replicas = 2
    agent.place(["a", "b"], ["here", "here"])
    agent.spec.strategy, agent.spec.strategy_settings = "stale-sparse", as_json(EXACT)
    return agent


@pytest.mark.parametrize(("kind", "dies_in", "goes_on_from"), [("gan", 13, 9), ("pair", 14, 15)])
def test_two_ranks_train_what_one_does_and_all_moments_come_back(
    kind: str, dies_in: int, goes_on_from: int, tmp_path: Path, start: Start
) -> None:
    """1. One worker trains alone, two train the same batches together: the weights agree to rounding, and a batch is a
    step, whoever steps how often in it; a pass exchanges what it reaches, so the discriminator's own nothing of the
    generator. 2. The two again: rank 1 is killed (SIGKILL) between the updates of two
    optimizers; the other ends with 75. Between a GAN's two passes there is only half of a step, so they go on from the
    checkpoint of step 9; of one pass the other rank makes both updates, and saves the whole. 3. They are asked to stop.
    4. They end with the same bits: losses, rates, weights, both optimizers' moments, the scaler."""
    alone, whole, broken = (folder(tmp_path, name) for name in ("alone", "whole", "broken"))
    assert torchrun_like(SCRIPT, kind, str(alone), world_size=1, start=start) == [0]
    with FakeAgent(whole, world_size=2, start=start) as agent:
        agent.start_workers(SCRIPT, kind, str(whole))
        assert agent.exit_codes() == [0, 0], agent.said()
        assert agent.alive[0][0] == 36
    if kind == "gan":
        one, other = 775, 1230  # entries and parameters of the discriminator, and of the generator
        by_step = [2 * one + other if step % 9 % 2 == 0 else one for step in range(36)]
        assert [line["reduced"] for line in lines(whole, 0)] == by_step
    torch.testing.assert_close(end(alone, 0)["weights"], end(whole, 1)["weights"], rtol=1e-2, atol=1e-3)

    unwritten = dies_in if goes_on_from > dies_in else -1  # of the killed rank
    dies = ("--die-at", str(dies_in))
    for run, last, codes in ((1, dies, [75, -signal.SIGKILL]), (2, (), [85, 85]), (3, (), [0, 0])):
        with FakeAgent(broken, run=run, world_size=2, start=start) as agent:
            agent.spec.checkpoint.every_steps = 9
            waits = ("--await-stop-at", "20") if run == 2 else ()
            agent.start_workers(SCRIPT, kind, str(broken), *last, *waits)
            if run == 2:
                agent.send_stop_in(20, rank=1)
            assert agent.exit_codes() == codes, agent.said()
            if run > 1:
                assert agent.said().count(f"resumes from step {goes_on_from}\n") == 2
                goes_on_from = agent.checkpoint_step
    for rank in range(2):
        assert lines(broken, rank) == [line for line in lines(whole, rank) if not rank or line["step"] != unwritten]
    assert same(end(broken, 3), end(whole, 1))


def test_power_fails_and_all_moments_come_back_from_memory(tmp_path: Path, start: Start) -> None:
    """1. Both workers are killed at once (SIGKILL); no checkpoint is on disk. 2. They go on from memory: at the step
    that they go on from, each rank's moments of both optimizers are those that it had there before, to the bit; by
    stale-sparse each has its own."""
    out = folder(tmp_path, "killed")
    with in_memory(out, 1, start) as agent:
        agent.start_workers(SCRIPT, "gan", str(out), "--often", "--hold-at", "16")
        agent.lose_power(11)
    with in_memory(out, 2, start) as agent:
        agent.start_workers(SCRIPT, "gan", str(out))
        assert agent.exit_codes() == [0, 0], agent.said()
        at = {int(step) for step in re.findall(r"resumes from step (\d+), from memory", agent.said())}
    (step,) = at
    assert step >= 11
    for rank in range(2):
        before, after = ((out / f"run-{run}-rank-{rank}.begun").read_text().splitlines() for run in (1, 2))
        # At an epoch's end the last batch is shown again before.
        at_step = next(line for line in after if json.loads(line)["step"] == step)
        assert at_step in before


def test_by_stale_sparse_a_batch_is_one_round_whoever_steps_in_it(tmp_path: Path, start: Start) -> None:
    """1. Everything is sent and nothing is late: with momentum the ranks train what dense trains. 2. A batch is one
    round, though two optimizers step in it; before, each step was one, and everything was sent twice. 3. With most left
    out and a round late, all ranks end with the same weights, digests compared in each round."""
    sparse = {"sparsity": 0.9, "digest_every": 1}
    # A pair steps in the second, fourth, sixth, eighth and last of an epoch's 9 batches.
    runs: dict[str, tuple[str, int, dict[str, Any] | None]] = {
        "dense": ("gan", 0, None),
        "exact": ("gan", 36, EXACT),
        "sparse": ("pair", 4 * 5, sparse),
    }
    ends = {}
    for name, (kind, rounds, settings) in runs.items():
        out = folder(tmp_path, name)
        more = ("--settings", json.dumps(settings)) if settings is not None else ()
        assert torchrun_like(SCRIPT, kind, str(out), "--sgd", *more, start=start) == [0, 0]
        assert same(end(out, 0, 0)["weights"], end(out, 0, 1)["weights"])
        ends[name] = end(out, 0)
        assert ends[name]["rounds"] == rounds
    torch.testing.assert_close(ends["exact"]["weights"], ends["dense"]["weights"], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("settings", [None, EXACT, {"exchange": "gradients"}], ids=["dense", "updates", "gradients"])
def test_what_cannot_be_trained_is_refused_by_name_on_every_rank(
    settings: dict[str, Any] | None, tmp_path: Path, start: Start
) -> None:
    """1. One of two optimizers is not prepared: by stale-sparse ranks diverged and the job ended well, by dense its
    moments were in no checkpoint. 2. One accumulates over batches at which the other steps. 3. By gradients several
    optimizers are refused at all. Nobody waits for anybody."""
    more = ("--settings", json.dumps(settings)) if settings is not None else ()
    by_gradients = settings is not None and settings.get("exchange") == "gradients"
    for kind, why in (
        ("unprepared", "4 parameters require a gradient and are no optimizer's: 0.bias, 1.weight, 1.bias"),
        ("apart", "several optimizers with exchange" if by_gradients else "AdamW accumulated gradients of parameter"),
    ):
        with (tmp_path / kind).open("wb") as log:
            assert torchrun_like(SCRIPT, kind, str(tmp_path), *more, start=start, log=log) == [1, 1]
        assert (tmp_path / kind).read_text().count(f"BadInput: {why}") == 2


def test_what_is_trained_later_than_it_was_prepared_is_refused() -> None:
    """1. A group of what was prepared is fine, so is freezing. 2. What was frozen requires a gradient. 3. A head came
    later, to model and optimizer."""
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    prepared = PreparedParameters(model, [optimizer])
    model[1].requires_grad_(False)
    optimizer.add_param_group({"params": model[0].weight})
    prepared.check()
    model[0].bias.requires_grad_(True)
    with pytest.raises(BadInput, match=r"parameter 0\.bias was frozen at run\.prepare and requires a gradient now"):
        prepared.check()
    model[0].bias.requires_grad_(False)
    model.append(nn.Linear(2, 3))
    optimizer.add_param_group({"params": model[2].parameters()})
    with pytest.raises(BadInput, match=r"the SGD got 2 parameters since run\.prepare \(\[3, 2\], \[3\]\)"):
        prepared.check()


def trained(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    for optimizer in optimizers:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_state_of_several_is_that_of_one_with_all_groups() -> None:
    """1. Two optimizers, one with two groups and a parameter of the other's. 2. Their state goes through a checkpoint
    and comes back, to the bit. 3. What other optimizers kept is refused, and so is one that keeps more than torch's.
    4. A single one is itself: checkpoints from before there were several have the same form."""

    def made() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        split = [{"params": model[0].weight}, {"params": model[1].parameters(), "lr": 0.3}]
        return model, [torch.optim.Adam(split, lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.5)]

    (model, optimizers), (_, others) = made(), made()
    trained(optimizers, model)
    together, back = as_one(optimizers), as_one(others)
    assert [group["lr"] for group in together.param_groups] == [0.1, 0.3, 0.1]
    assert len(together.state) == 5
    state = unpack_state(*pack_state(together.state_dict(), copy=True))
    assert [group["params"] for group in state["param_groups"]] == [[0], [1, 2], [3, 4]]
    back.load_state_dict(state)
    assert same([one.state_dict() for one in optimizers], [one.state_dict() for one in others])
    with pytest.raises(ValueError, match="it has 2 parameter groups, the optimizers have 3"):
        back.load_state_dict(optimizers[0].state_dict())
    assert as_one(optimizers[:1]) is optimizers[0]

    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "clock": 3}

    with pytest.raises(CheckpointError, match="optimizer 1 is a Own, which keeps state beside that of its parameters"):
        as_one([optimizers[0], Own(model.parameters(), lr=0.1)]).state_dict()
