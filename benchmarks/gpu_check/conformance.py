"""Stage 6: what trains on the device trains as plain torch does on the same device.

Rows are the cells of the conformance matrix that a CPU cannot show; models, optimizers and data are the matrix's."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from cases import STRATEGIES
from deviations import deviation
from models import FEATURES, Batch, Samples
from optimizers import RECIPES
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.strategies import registry
from gpu_check.atoll_runs import import_everything, join_one_rank
from gpu_check.rows import Measured, Rows

EPOCHS: Final = 2
SAMPLES: Final = 48
BATCH: Final = 8
CELL_LIMIT_S: Final = 60.0
DEVIATION: Final = {"float32": 2e-3, "bfloat16": 0.05, "float16": 0.05}
"""Largest distance from plain torch, as a share of the way that plain torch went, by the forward pass's precision."""
WAYS: Final[Mapping[str, tuple[str, bool]]] = {
    "dense": ("dense", False),
    "dense, group of one": ("dense", True),
    "local-steps": ("local-steps/exact", False),
}
"""A strategy of the matrix, and whether the run has a process group of one rank."""


@dataclass(frozen=True, slots=True)
class Cell:
    feature: str = "mlp"
    optimizer: str = "sgd-momentum"
    precision: str = "float32"
    passes: int = 1
    mode: str = ""
    """The mode of torch.compile; empty where the model is not compiled."""
    gpu_only: bool = False

    def __str__(self) -> str:
        extra = (
            f"{self.passes} passes an update" if self.passes > 1 else "",
            f"compiled, {self.mode}" if self.mode else "",
        )
        return ", ".join(filter(None, (self.feature, self.optimizer, self.precision, *extra)))


CELLS: Final = (
    Cell(),
    Cell(feature="channels-last", optimizer="adamw-fused"),
    Cell(feature="odd-layouts", optimizer="sgd-fused"),
    Cell(optimizer="adamw-fused", precision="float16"),
    Cell(feature="channels-last", optimizer="adamw-fused", precision="bfloat16"),
    Cell(optimizer="adamw-capturable", gpu_only=True),
    Cell(feature="lstm", optimizer="adam"),
    Cell(feature="embedding", optimizer="adamw-fused"),
    Cell(optimizer="adamw-fused", passes=2),
    Cell(mode="reduce-overhead", gpu_only=True),
)


def run(device: str, rows: Rows) -> None:
    import_everything()
    for cell in CELLS:
        if cell.gpu_only and device == "cpu":
            rows.skip(str(cell), "it needs a GPU")
        else:
            rows.measure(str(cell), partial(_compared, cell, device), CELL_LIMIT_S)


Tensors = dict[str, torch.Tensor]


def _compared(cell: Cell, device: str) -> Measured:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start, whole = trained(cell, Plain(device))
    assert all(bool(one.isfinite().all()) for one in whole.values()), (
        "plain torch ends with weights that are not finite"
    )
    found = {}
    for way in WAYS:
        with contextlib.closing(Trained(way)) as driver:
            begun, ended = trained(cell, driver)
            assert all(torch.equal(begun[name], start[name]) for name in start), "the models do not start equal"
            found[way] = max(deviation(ended[name], whole[name], start[name]) for name in start)
    text = ", ".join(f"{way} {one:.1e}" for way, one in found.items())
    return max(found.values()) <= DEVIATION[cell.precision], f"off by {text}", found


class Plain:
    """Plain torch on the device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: DataLoader[Batch]) -> Iterable[Batch]:
        model.to(self.device)
        return _Moved(data, self.device)

    def epochs(self) -> Iterable[int]:
        return range(EPOCHS)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def local_pass(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Trained:
    """Atoll, alone or in a group of one rank."""

    def __init__(self, way: str) -> None:
        strategy, grouped = WAYS[way]
        name, settings = STRATEGIES[strategy]
        self.run = atoll.init(seed=1, strategy=registry.find(name).settings(**settings))
        self.device = self.run.device
        if grouped:
            join_one_rank(self.run)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: DataLoader[Batch]) -> Iterable[Batch]:
        _, _, loader = self.run.prepare(model, optimizer, data)
        return loader

    def epochs(self) -> Iterable[int]:
        return self.run.epochs(EPOCHS)

    def backward(self, loss: torch.Tensor) -> None:
        self.run.backward(loss)

    def local_pass(self) -> AbstractContextManager[None]:
        return self.run.no_sync()

    def close(self) -> None:
        self.run.close()


@dataclass(frozen=True, slots=True)
class _Moved:
    data: Iterable[Batch]
    device: torch.device

    def __iter__(self) -> Iterator[Batch]:
        return ((x.to(self.device), y.to(self.device), sample.to(self.device)) for x, y, sample in self.data)


def trained(cell: Cell, driver: Plain | Trained) -> tuple[Tensors, Tensors]:
    """Train the cell's model. Returns its state before and after, on the CPU."""
    feature, device = FEATURES[cell.feature], driver.device
    torch.manual_seed(1)
    model = feature.build()
    start = _state(model)
    (optimizer,) = RECIPES[cell.optimizer].make(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, enabled=cell.precision == "float16")
    called: Any = torch.compile(model, mode=cell.mode) if cell.mode else model
    loader = driver.prepare(called, optimizer, DataLoader(Samples(SAMPLES), BATCH))
    for _ in driver.epochs():
        for number, batch in enumerate(loader, 1):
            last = number % cell.passes == 0
            with contextlib.nullcontext() if last else driver.local_pass():
                with _autocast(cell.precision, device):
                    outputs = feature.forward(called, batch)
                loss = (outputs.float() - batch[1]).square().mean() / cell.passes
                driver.backward(scaler.scale(loss))
            if last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return start, _state(model)


def _autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    dtypes: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return torch.autocast(device.type, dtype=dtypes[precision]) if precision in dtypes else contextlib.nullcontext()


def _state(model: nn.Module) -> Tensors:
    return {name: one.detach().cpu().clone() for name, one in model.state_dict().items()}
