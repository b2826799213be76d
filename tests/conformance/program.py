"""The training program of a conformance case, and its reference: plain torch, one process, whole batches.

Atoll is not imported here. Workers run the same program through a driver of their own (case_worker.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Final, Protocol

import torch
from cases import Case
from models import FEATURES, Batch, Samples
from optimizers import RECIPES, Recipe
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

EPOCHS: Final = 2
SPOILED_STEP: Final = 2
"""The step in which one sample's loss overflows or is NaN, in the cases that have one."""
MAX_NORM: Final = 0.5

Tensors = dict[str, torch.Tensor]


@dataclass
class Outcome:
    start: Tensors
    end: Tensors
    losses: list[float]
    parameters: frozenset[str]
    """Those that required a gradient when training began."""


class Driver(Protocol):
    """What a program asks of the system that trains it."""

    seed: int

    @property
    def device(self) -> torch.device: ...

    def prepare(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Any]
    ) -> Iterable[Batch]: ...

    def track(self, name: str, one: Any) -> None: ...

    def epochs(self, total: int) -> Iterator[int]: ...

    def slices(self, batch: Batch) -> Iterable[tuple[Batch, float]]: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def local_pass(self) -> AbstractContextManager[None]: ...

    def clip(self, model: nn.Module) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def pass_begins(self) -> None: ...

    @property
    def step(self) -> int: ...

    @property
    def last_batch(self) -> bool: ...


class Plain:
    """Plain torch. Batches come in the order of the samples; `case.slices` cuts each like the ranks of a run."""

    def __init__(self, case: Case, seed: int = 1, device: str = "cpu") -> None:
        self._case, self.seed, self.device = case, seed, torch.device(device)
        self.step, self.last_batch = 0, False

    def prepare(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tracked: Mapping[str, Any]
    ) -> Iterable[Batch]:
        model.to(self.device)
        return self

    def __iter__(self) -> Iterator[Batch]:
        data, order = Samples(self._case.samples), self._case.order
        for begin in range(0, len(order), self._case.batch):
            self.last_batch = begin + self._case.batch >= len(order)
            rows = torch.tensor(order[begin : begin + self._case.batch])
            yield data.x[rows].to(self.device), data.y[rows].to(self.device), rows.to(self.device)
            self.step += 1

    def track(self, name: str, one: Any) -> None:
        pass

    def epochs(self, total: int) -> Iterator[int]:
        yield from range(total)

    def slices(self, batch: Batch) -> Iterable[tuple[Batch, float]]:
        feature, total = FEATURES[self._case.feature], len(batch[0])
        if feature.by_slices:
            parts = torch.arange(total).split(list(self._case.slices(self.step)))
        elif feature.forward_writes and self._case.micro_batches > 1:
            parts = self._micro_batches(total)
        else:
            return [(batch, 1.0)]
        x, y, sample = batch
        return [((x[part], y[part], sample[part]), len(part) / total) for part in parts]

    def _micro_batches(self, total: int) -> tuple[torch.Tensor, ...]:
        """Return the rows that replicas train in their first passes, and in their second ones."""
        replicas = [one.chunk(self._case.micro_batches) for one in torch.arange(total).split(self._case.engine_batch)]
        return tuple(torch.cat([one for one in passes if one is not None]) for passes in zip_longest(*replicas))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def local_pass(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clip(self, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    def begin_step(self, step: int) -> None:
        pass

    def pass_begins(self) -> None:
        pass


class OneRank(Plain):
    """Plain torch that trains what one rank does of each batch, and nothing of the others."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case)
        sizes = case.slices(0)
        self._slice = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def __iter__(self) -> Iterator[Batch]:
        for x, y, sample in super().__iter__():
            if len(sample[self._slice]):
                yield x[self._slice], y[self._slice], sample[self._slice]

    def slices(self, batch: Batch) -> Iterable[tuple[Batch, float]]:
        return [(batch, 1.0)]


def train(case: Case, driver: Driver) -> Outcome:
    """Train the case's model for EPOCHS epochs. The outcome's tensors are copies."""
    feature, recipe = FEATURES[case.feature], RECIPES[case.optimizer]
    model, start, parameters = untrained(case, driver.seed)
    optimizers = recipe.make(model)
    # A larger scale would let gradients of a rank's few samples overflow where those of plain torch, which weighs the
    # loss of each slice first, do not.
    scaler = torch.amp.GradScaler(  # type: ignore[attr-defined]
        driver.device.type, init_scale=16.0, enabled=case.precision.startswith("float16")
    )
    schedulers = schedulers_of(recipe, optimizers)
    tracked: dict[str, Any] = {**schedulers}
    if scaler.is_enabled():
        tracked["scaler"] = scaler
    called = compiled(case, model)
    loader = driver.prepare(called, optimizers, tracked)
    average = averaged(case, model)
    if average is not None:
        driver.track("average", average)
    losses: list[float] = []
    for _ in driver.epochs(EPOCHS):
        for batch in loader:
            driver.begin_step(driver.step)
            updates = driver.step // case.passes
            feature.before_step(model, updates)
            recipe.before_step(optimizers, model, updates)
            passes = partial(_passes, case, driver, called, batch, scaler)
            last_pass = (driver.step % case.steps + 1) % case.passes == 0 or driver.last_batch
            with contextlib.nullcontext() if last_pass or case.wrapper != "no-sync" else driver.local_pass():
                losses.append(0.0 if recipe.closure else passes())
            if not last_pass:
                continue
            _update(case, driver, model, optimizers, scaler, passes=passes)
            for one in schedulers.values() if recipe.schedule == "step" else ():
                one.step()
            feature.after_update(model, updates)
            if average is not None:
                average.update_parameters(model)
        for one in schedulers.values() if recipe.schedule == "epoch" else ():
            one.step()
    return Outcome(start, state_of(model, average), losses, parameters)


def compiled(case: Case, model: nn.Module) -> Any:
    """Return what the program calls in place of the model."""
    if not case.wrapper.startswith("compile"):
        return model
    torch._dynamo.reset()  # type: ignore[no-untyped-call]  # or the limit of recompilations counts those of other cases
    return torch.compile(model, fullgraph=case.wrapper == "compile-fullgraph", **case.compiler)


def schedulers_of(
    recipe: Recipe, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.optim.lr_scheduler.StepLR]:
    """Return the recipe's schedulers by the names under which they are tracked."""
    every = {"step": 2, "epoch": 1}.get(recipe.schedule)
    scheduled = optimizers if every is not None else ()
    return {
        f"schedule_{number}": torch.optim.lr_scheduler.StepLR(one, step_size=every or 1, gamma=0.7)
        for number, one in enumerate(scheduled)
    }


def averaged(case: Case, model: nn.Module) -> AveragedModel | None:
    """Return the script's average of the weights, in cases that have one."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if FEATURES[case.feature].average else None


def untrained(case: Case, seed: int) -> tuple[nn.Module, Tensors, frozenset[str]]:
    """Return the case's model, a copy of its state, and the names of the parameters that require a gradient."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes ten times as long where there may be a GPU
    model = FEATURES[case.feature].build()
    _set_precision(model, case.precision)
    return model, state_of(model), frozenset(name for name, one in model.named_parameters() if one.requires_grad)


def _set_precision(model: nn.Module, precision: str) -> None:
    if precision == "bfloat16":
        model.bfloat16()
    elif precision == "mixed":
        for one in model.parameters():
            if one.dim() > 1:
                one.data = one.data.bfloat16()


def state_of(model: nn.Module, average: nn.Module | None = None) -> Tensors:
    """Return copies of the model's tensors on the CPU, and of the average's under names of their own."""
    found = {
        name: one.detach().clone().cpu() for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)
    }
    if average is not None:
        found |= {f"average.{name}": one for name, one in state_of(average).items()}
    return found


def _passes(case: Case, driver: Driver, model: Any, batch: Batch, scaler: Any) -> float:
    """Run forward and backward passes of a batch. Returns the mean loss."""
    total = 0.0
    for part, weight in driver.slices(batch):
        loss = loss_of_batch(case, driver, model, part)
        total += weight * loss.item()
        driver.backward(scaler.scale(loss * (weight / case.passes)))
    return total


def loss_of_batch(case: Case, driver: Driver, model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean of the samples' squared errors, []."""
    x, y, sample = batch
    if case.precision == "bfloat16":
        x = x.bfloat16()
    with autocast(case.precision, driver.device.type):
        outputs = FEATURES[case.feature].forward(model, (x, y, sample))
    return errors_of(case, driver, outputs, y, sample).mean()


def errors_of(case: Case, driver: Driver, outputs: torch.Tensor, y: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return the samples' squared errors, float32 [batch]."""
    errors = (outputs.double() - y.double()).square().mean(dim=1).to(y.dtype)
    return errors * _spoiled(case, sample) if driver.step == SPOILED_STEP else errors


def _spoiled(case: Case, sample: torch.Tensor) -> torch.Tensor:
    """Return the factors of the samples' losses, float32 [batch]: one sample of the last rank's slice is spoiled."""
    factor = {"float16-overflow": 1e30}.get(case.precision, 1.0)
    if case.event == "one-nan":
        factor = float("nan")
    last = (SPOILED_STEP + 1) * case.batch - 1
    return torch.where(sample == case.order[last], factor, 1.0)


def autocast(precision: str, device: str = "cpu") -> AbstractContextManager[Any]:
    dtypes = {"autocast": torch.bfloat16, "mixed": torch.bfloat16}
    dtype = torch.float16 if precision.startswith("float16") else dtypes.get(precision)
    return torch.autocast(device, dtype=dtype) if dtype is not None else contextlib.nullcontext()


def _update(
    case: Case,
    driver: Driver,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: Any,
    *,
    passes: Callable[[], float],
) -> None:
    if RECIPES[case.optimizer].closure:
        (optimizer,) = optimizers

        def closure() -> float:
            optimizer.zero_grad()
            return passes()

        optimizer.step(closure)  # type: ignore[arg-type]
        return
    if case.wrapper in {"clip", "clip-torch"}:
        for one in optimizers:
            scaler.unscale_(one)
        driver.clip(model)
    for one in optimizers:
        scaler.step(one)
    scaler.update()
    for one in optimizers:
        one.zero_grad()


def loss_of(case: Case, state: Tensors) -> float:
    """Return the mean squared error of a model in this state over all samples, in evaluation mode."""
    feature = FEATURES[case.feature]
    model = feature.build()
    model.load_state_dict({name: one for name, one in state.items() if not name.startswith("average.")})
    model.eval()
    if feature.forward is not FEATURES["float64"].forward:
        model.float()
    samples = Samples(case.samples)
    with torch.no_grad():
        outputs = feature.forward(model, (samples.x, samples.y, torch.arange(case.samples)))
    return float((outputs.double() - samples.y.double()).square().mean())
