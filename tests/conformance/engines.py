"""The program of a conformance case whose strategy makes passes and updates itself: the script gives it the model, what
makes the optimizer, and the loss. Compared with plain torch's own loop, as every other case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from cases import Case
from models import FEATURES, Batch, Samples, Stream
from optimizers import RECIPES
from program import (
    EPOCHS,
    MAX_NORM,
    Driver,
    Outcome,
    autocast,
    averaged,
    compiled,
    errors_of,
    schedulers_of,
    state_of,
    untrained,
)
from torch import nn
from torch.utils.data import default_collate

Pairs = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Whole(nn.Module):
    """The case's model, called as its feature says."""

    def __init__(self, case: Case, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._case = case
        self._called = compiled(case, inner)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, sample = inputs
        if self._case.precision == "bfloat16":
            x = x.bfloat16()
        return FEATURES[self._case.feature].forward(self._called, (x, x, sample))


def train(case: Case, driver: Driver, run: Any) -> Outcome:
    """Train the case's model for EPOCHS epochs by `run.prepare_pipeline`."""
    feature, recipe = FEATURES[case.feature], RECIPES[case.optimizer]
    model, start, parameters = untrained(case, driver.seed)
    made: list[torch.optim.Optimizer] = []

    def make(_: Iterable[nn.Parameter]) -> Any:
        made.extend(recipe.make(model))
        return made[0] if len(made) == 1 else made

    def loss(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        driver.pass_begins()
        return errors_of(case, driver, outputs, *targets).mean()

    step, loader = run.prepare_pipeline(
        Whole(case, model),
        make,
        loss,
        Stream(case.samples) if case.wrapper == "stream" else Samples(case.samples),
        case.engine_batch,
        case.micro_batches,
        clip_norm=MAX_NORM if case.wrapper == "clip" else None,
        round_batches=1,
        shuffle=False,
        collate_fn=_pairs,
    )
    schedulers = schedulers_of(recipe, made)
    average = averaged(case, model)
    for name, one in {**schedulers, **({"average": average} if average is not None else {})}.items():
        run.track(name, one)
    losses: list[float] = []
    for _ in run.epochs(EPOCHS):
        for batch in loader:
            driver.begin_step(driver.step)
            number = driver.step
            feature.before_step(model, number)
            recipe.before_step(made, model, number)
            with autocast(case.precision):
                losses.append(step(batch).item())
            for one in schedulers.values() if recipe.schedule == "step" else ():
                one.step()
            feature.after_update(model, number)
            if average is not None:
                average.update_parameters(model)
        for one in schedulers.values() if recipe.schedule == "epoch" else ():
            one.step()
    return Outcome(start, state_of(model, average), losses, parameters)


def _pairs(rows: list[Batch]) -> Pairs:
    x, y, sample = default_collate(rows)
    return (x, sample), (y, sample)
