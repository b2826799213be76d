"""A small regression, under strategy stale-sparse or another that keeps residuals, that writes down everything it did.

OUT/run-N-rank-R.jsonl has a line for each batch. OUT/run-N-rank-R.begin and .end (torch.save) have, by parameter, what
this rank's residuals, the shared parameters, the model's own weights, and what this rank's gradients add up to, each
weighted by its part of the batch and by the plan's factor of the learning rate. .end is written however the run ends,
short of being killed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faulty_peer import faulty
from generations import await_generation, keep_every_step, keep_no_more
from stopping import await_stop
from torch import nn

import atoll
from atoll.agent.runtime.membership.recovery import continue_without_rollback, roll_back_to_memory
from atoll.agent.runtime.step.drivers.local_update_step import LocalUpdateStep
from atoll.agent.runtime.step.drivers.reduced_step import ReducedStep
from atoll.agent.runtime.step.drivers.step_driver import StepDriver
from atoll.errors import PeerLost
from atoll.strategies.shared_params.rolling import RollingSharedParams

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--sleep-s", type=float, default=0.0, help="pretended work per step")
parser.add_argument("--raise-at", type=int, default=-1, help="rank 1 gets --signal in this step, before its gradients")
parser.add_argument("--hold-at", type=int, default=-1, help="rank 1 waits in this step until OUT/strike is there")
parser.add_argument("--behind", action="store_true", help="rank 0 is still in --raise-at's step when it hears of it")
parser.add_argument("--signal", type=int, default=signal.SIGKILL)
parser.add_argument("--fault", default="", help="STEP:STAGE:die of rank 1, before it sends")
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--settings", type=json.loads, help="of atoll.StaleSparse, where no agent tells them")
parser.add_argument("--checkpoints", type=Path, help="where to save, without an agent")
parser.add_argument("--silent-rank", type=int, default=-1, help="this rank's gradients are all zero")
parser.add_argument("--flip-at", type=int, default=-1, help="rank 1 flips a bit of a shared parameter before this step")
parser.add_argument(
    "--keep-sums", action="store_true", help="OUT/run-N-rank-R.sums-S: what gradients add up to by step S"
)
parser.add_argument("--synchronize-at", type=int, default=-1, help="after this step")
parser.add_argument("--die-flushed", action="store_true", help="synchronize after an epoch, slowly remembered; SIGKILL")
parser.add_argument("--often", action="store_true", help="a generation in memory every step")
parser.add_argument("--goes-back-s", type=float, help="a copy in memory that is older is not gone back to")
parser.add_argument("--lose-in-update", type=int, default=-1, help="others than rank 1 lose it in this step's update")
parser.add_argument("--seldom-from", type=int, default=-1, help="no generation in memory after this step, or the next")
parser.add_argument("--break-flush", default="", help="RANK:SIGNAL, in the middle of it; signal 0: its link breaks")
parser.add_argument("--await-stop-at", type=int, default=-1, help="rank 0 waits in this step for a stop")
parser.add_argument("--look", action="store_true", help="OUT/run-N-rank-R.looks: whose weights passes and updates have")
parser.add_argument("--die-in-view", choices=("taking over", "building", "starting"), help="rank 2, before that")
parser.add_argument("--await-view-at", type=int, default=-1, help="in this step, for a newer view than its own")
parser.add_argument("--awaited-view", type=int, default=0, help="in place of that: for this one, or a newer")
parser.add_argument("--hidden", type=int, default=64, help="width of the first hidden layer")
parser.add_argument("--nan-at", type=int, default=-1, help="rank 1's loss is NaN in this step")
parser.add_argument("--poison-at", type=int, default=-1, help="ranks 0 and 1 get NaN weights and moments after it")
options = parser.parse_args()

SAMPLES, BATCH = 100, 12  # 8 whole batches and one of 4 in each epoch
run = atoll.init(
    seed=7,
    strategy=atoll.StaleSparse(**options.settings) if options.settings is not None else "dense",
    checkpoint_directory=options.checkpoints,
)
RANK = int(os.environ.get("ATOLL_RANK", run.rank))  # for good: that of a later view may be another
NAME = f"run-{os.environ.get('ATOLL_RUN', '0')}-rank-{RANK}"


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    return torch.utils.data.TensorDataset(inputs, targets, torch.arange(SAMPLES))


model = nn.Sequential(
    nn.Linear(8, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 33), nn.Tanh(), nn.Linear(33, 1)
)
summed = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.named_parameters()}
of_this_pass: dict[str, torch.Tensor] = {}
for name, parameter in model.named_parameters():  # before anyone else's hooks: gradients as they are
    parameter.register_hook(lambda gradient, name=name: of_this_pass.update({name: gradient.double()}))
family = torch.optim.AdamW if options.adamw else torch.optim.SGD
optimizer = family(model.parameters(), lr=0.01)
model, optimizer, loader = run.prepare(model, optimizer, data(), batch_size=BATCH)
begun_step = run.step
optimizer.register_step_pre_hook(lambda *_: look("update"))


def exchange() -> Any:
    """Of the view under way."""
    assert run._training is not None
    return getattr(run._training._current.driver, "update", None)


def look(where: str) -> None:
    """Whether parameters have this rank's own values, and whether the shared parameters'."""
    if options.look:
        layers = exchange()._layers
        own = all(torch.equal(one.live, one.parameter.detach().reshape(-1)) for one in layers)
        shared_params = all(torch.equal(one.shared_param, one.parameter.detach().reshape(-1)) for one in layers)
        with (options.out / f"{NAME}.looks").open("a") as file:
            file.write(
                json.dumps({"step": run.step, "where": where, "own": own, "shared_params": shared_params}) + "\n"
            )


def keep(what: str) -> None:
    assert run._training is not None
    durable: Any = run._training._current.driver.durable
    trained, shared_params = dict(model.named_parameters()), durable.shared_params()
    residuals = durable.residuals() if shared_params else durable.own_at_boundary()
    aggregator_sums = durable.aggregator_sums() if shared_params else {}
    state = {
        "residuals": {name: flat.clone().view_as(trained[name]) for name, flat in residuals.items()},
        "aggregator_sums": {name: flat.clone().view_as(trained[name]) for name, flat in aggregator_sums.items()},
        "shared_params": {name: shared_params.get(id(one), one).detach().clone() for name, one in trained.items()},
        "live": {name: one.detach().clone() for name, one in model.named_parameters()},
        "summed": summed,
        "telling": list(getattr(durable, "telling", ())),
        "step": run.step,
    }
    torch.save(state, options.out / f"{NAME}.{what}")


def await_strike() -> None:
    ends_s = time.monotonic() + 120
    while not (options.out / "strike").exists():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def lose_in_update() -> None:
    """Whom the wait for what was selected would tell of, if it came just then."""

    def lost(*_: object) -> None:
        raise PeerLost("rank 1 is gone")

    exchange()._exchange.await_selected = lost


def await_view() -> None:
    link, ends_s, wanted = run._link, time.monotonic() + 120, options.awaited_view or run._session.view + 1
    while link is not None and (link.newest_view is None or link.newest_view.view < wanted):
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def break_flush() -> None:
    """Let this rank be lost when it has given the first tensor away and not yet taken what came of it."""
    number = int(options.break_flush.partition(":")[2])
    reduce = torch.distributed.all_reduce

    def breaking(tensor: torch.Tensor, **settings: Any) -> Any:
        reduce(tensor.clone(), **settings).wait()
        if number:
            os.kill(os.getpid(), number)
        raise RuntimeError("Connection closed by peer")

    torch.distributed.all_reduce = breaking


def die_flushed() -> None:
    """As the machines lose power while the script evaluates what it has synchronized; once a generation is of the same
    boundary, which all ranks know alike."""
    tier: Any = run._training.state.memory  # type: ignore[union-attr]
    if tier._current != run.step:
        return
    wait, taken = RollingSharedParams.wait, threading.Event()

    def slowly(self: RollingSharedParams, stopped: Callable[[], bool]) -> bool:
        taken.wait(0.5)
        well = wait(self, stopped)
        taken.set()
        return well

    RollingSharedParams.wait = slowly  # type: ignore[method-assign]
    run.synchronize()
    tier.close()
    run.sum(0.0)  # all have synchronized
    threading.Event().wait(1.0)  # so that no rank sees another one go
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_view() -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if options.die_in_view == "taking over":
        vars(continue_without_rollback)["transfer_checkpoint"] = die
    elif options.die_in_view == "building":
        StepDriver.__init__ = die  # type: ignore[method-assign]
    else:
        ReducedStep.start = LocalUpdateStep.start = die  # type: ignore[method-assign]


def await_behind(step: int) -> None:
    """Rank 1 waits until rank 2 has made this step, rank 0 until it knows that rank 1 is gone."""
    ends_s, log = time.monotonic() + 120, options.out / NAME.replace(f"rank-{RANK}", "rank-2.jsonl")
    while not (RANK == 0 and exchange()._channel.proposals._broken):
        assert time.monotonic() < ends_s
        time.sleep(0.005)
        if RANK == 1 and any(json.loads(line)["step"] == step for line in log.read_text().splitlines()):
            return


def step_counts() -> bool:
    """Return whether the step just made stays: a rank that lost a peer before its update makes it for show."""
    assert run._training is not None
    succession = run._training.succession
    return succession.member.aborted is None or succession.member.updated_to is not None


@torch.no_grad()
def poison() -> None:
    """As an overflow within the update leaves it."""
    first = next(model.parameters())
    for one in (first, *optimizer.state[first].values()):
        if one.dim() > 0:
            one[3] = torch.nan


def go_back(step: int) -> None:
    """Before a batch: what came after this step counts for nothing."""
    path = options.out / f"{NAME}.sums-{step}"
    for name, one in torch.load(path, weights_only=True).items():
        summed[name].copy_(one)


if options.die_flushed or options.often:
    keep_every_step()
if options.die_in_view is not None and RANK == 2:
    die_in_view()
if options.goes_back_s is not None:
    vars(roll_back_to_memory)["MAX_RETRAINED_S"] = options.goes_back_s
next_step = begun_step
if not run._session.joins:
    keep("begin")
with (
    (options.out / f"{NAME}.jsonl").open("a", buffering=1) as log,
    faulty(run, options.fault, lambda payload, what: bytes(payload)),
):
    try:
        for epoch in run.epochs(options.epochs):
            for x, y, ids in loader:
                time.sleep(options.sleep_s)
                batch = loader.current
                if options.often and batch.step < options.hold_at:  # who holds keeps later ones from being whole
                    await_generation(run)
                if batch.step < next_step and batch.step >= begun_step:
                    go_back(batch.step)
                next_step = batch.step + 1
                if RANK == 1 and batch.step == options.flip_at:
                    exchange()._layers[2].shared_param.view(torch.int32)[5] ^= 1
                if batch.step == options.await_stop_at and RANK == 0:
                    await_stop(run)
                if batch.step == options.await_view_at:
                    await_view()
                if batch.step == options.seldom_from:
                    keep_no_more()
                if RANK != 1 and batch.step == options.lose_in_update and run._session.view == 1:
                    lose_in_update()
                if RANK == 1 and batch.step == options.hold_at:
                    await_strike()
                if options.behind and RANK < 2 and batch.step == options.raise_at:
                    await_behind(batch.step)
                if RANK == 1 and batch.step == options.raise_at:
                    os.kill(os.getpid(), options.signal)
                loss = nn.functional.mse_loss(model(x), y) * (options.silent_rank != RANK)
                if RANK == 1 and batch.step == options.nan_at:
                    loss = loss * torch.nan
                look("forward")
                run.backward(loss)
                assert run.statistics().get("sparsity", 0) <= 1  # looking takes nothing away from what is told
                optimizer.step()
                optimizer.zero_grad()
                if RANK < 2 and batch.step == options.poison_at:
                    poison()
                if batch.step >= begun_step:  # at an epoch's end the last batch is shown again
                    for name, gradient in of_this_pass.items() if step_counts() else ():
                        if gradient.isfinite().all():
                            summed[name].add_(gradient, alpha=batch.weight * run.learning_rate_factor)
                    trained = {
                        "step": batch.step,
                        "epoch": epoch,
                        "view": run._session.view,
                        "ids": ids.tolist() if batch.local else [],
                    }
                    log.write(json.dumps(trained | {"loss": loss.item()}) + "\n")
                    if options.keep_sums:
                        torch.save(summed, options.out / f"{NAME}.sums-{batch.step + 1}")
                if options.break_flush.startswith(f"{RANK}:") and batch.step == max(options.synchronize_at, 3):
                    break_flush()
                if batch.step == options.synchronize_at:
                    run.synchronize()
            run.report(loss=loss.item())
            if options.die_flushed:
                die_flushed()
    finally:
        keep("end")
