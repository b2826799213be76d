"""Strategies at exact settings against one process of plain torch that trains the whole batch: where memory lies, which
gradients are None, what copies of a prepared model are. tests/conformance trains every other combination.

Started with a port for each run and a folder for checkpoints. Batches of 7 and a last of 1 make unequal parts, empty
ones too."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import torch
from several_runs import check_all_ranks_have, opened
from torch import nn

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.errors import BadInput
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.declaration import StrategySettings
from atoll.strategies.local_steps.settings import LocalSteps
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.zen import worker as zen_worker
from atoll.strategies.zen.settings import Zen

SAMPLES, BATCH, EPOCHS = 29, 7, 2
STEPS_PER_EPOCH: Final = -(-SAMPLES // BATCH)
PLACE: Final = WorkerPlace.from_environment()
Optimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Layouts(nn.Module):
    """Parameters whose entries lie in memory in every dense order there is, and in none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.pointwise = nn.Conv2d(6, 4, 1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(36, 5).t())
        self.permuted = nn.Parameter(torch.randn(4, 3, 5).permute(2, 0, 1))  # [5, 4, 3]
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(12, 3)

    def forward(self, images: torch.Tensor, step: int = 0) -> torch.Tensor:
        channels = self.pointwise(self.conv(images).tanh())
        features = nn.functional.linear(channels.flatten(1), self.transposed).tanh()
        wide = torch.einsum("ni,ijk->njk", features * self.scale, self.permuted)
        return self.last(wide.flatten(1))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """One expert by turns; the last is never used, and one layer is frozen after the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(75, 8)
        self.frozen_later = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, images: torch.Tensor, step: int) -> torch.Tensor:
        self.frozen_later.requires_grad_(step < STEPS_PER_EPOCH)
        features = self.frozen_later(self.first(images.flatten(1)).tanh())
        return self.experts[step % 3](features)  # type: ignore[no-any-return]


class Both(nn.Module):
    """The sum of the two above."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts, self.experts = Layouts(), Experts()

    def forward(self, images: torch.Tensor, step: int) -> torch.Tensor:
        return self.layouts(images) + self.experts(images, step)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    name: str
    strategy: str | StrategySettings
    model: Callable[[], nn.Module]
    optimizer: Optimizer
    resumes: bool = False
    lossy: bool = False
    large: int = zen_worker.LARGE_ENTRIES
    write: Callable[[nn.Module], None] | None = None  # what the script does to weights after updates of the last epoch


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, fused=True)


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    """Weight decay by hand; linear, so that the mean over workers of what each wrote is what one process writes."""
    for one in model.parameters():
        one.mul_(0.9)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for one in model.parameters():
        one.data.clamp_(-0.15, 0.15)


def whole(algorithm: str, **settings: Any) -> Compressed:
    """Every entry is sent as it is."""
    return Compressed(**{"algorithm": algorithm, "min_bytes": 0, **settings})  # type: ignore[arg-type]


EXACT: Final[dict[str, Any]] = {"values": "float32", "staleness": 0}
CASES: Final = (
    Case("dense, AdamW", "dense", Both, adamw, resumes=True, write=clamp),
    Case("zen", Zen(), Both, adamw, large=1, write=clamp),
    Case("threshold 0", whole("threshold", threshold=0), Both, adamw, resumes=True, write=clamp),
    Case("local-steps", LocalSteps(density=1.0, **EXACT), Layouts, sgd, resumes=True, write=shrink),
    Case(
        "at shared parameters", LocalSteps(density=1.0, gradients="shared_params", **EXACT), Layouts, sgd, write=shrink
    ),
    Case("gradients", StaleSparse(sparsity=0.0, exchange="gradients", **EXACT), Layouts, adamw, resumes=True),
    Case("experts", whole("dgc", density=0.1), Experts, adamw, lossy=True),
)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 3, 5, 5, generator=generator)
    return torch.utils.data.TensorDataset(images, torch.randn(SAMPLES, 3, generator=generator))


def built(case: Case, optimizer: Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = case.model()
    return model, optimizer(list(model.parameters()))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def without_gradient(model: nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters() if one.grad is None}


def alone(case: Case) -> tuple[dict[str, torch.Tensor], list[set[str]]]:
    """In this process, with the whole batch: the weights, and by step which parameters have no gradient."""
    model, optimizer = built(case, case.optimizer)
    images, targets = data().tensors
    none = []
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        here = slice(begin := step % STEPS_PER_EPOCH * BATCH, begin + BATCH)
        nn.functional.mse_loss(model(images[here], step), targets[here]).backward()
        none.append(without_gradient(model))
        optimizer.step()
        optimizer.zero_grad()
        if case.write is not None and step >= STEPS_PER_EPOCH:
            case.write(model)
    return values(model), none


def check_copies(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> None:
    """What scripts do to keep the best weights or an average of them: the copy computes as the model, and is no part of
    the run."""
    optimizers = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))  # noqa: S301
    assert all(type(one) is type(optimizer) for one in optimizers)
    torch.save(model, io.BytesIO())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    pickled = pickle.dumps(model)
    assert b"atoll" not in pickled.replace(b"_atoll_joined", b"")
    copies = copy.deepcopy(model), averaged, pickle.loads(pickled)  # noqa: S301
    with torch.no_grad():
        expected = model(images, 0)
        for copied in copies:
            assert torch.equal(copied(images, 0), expected)
            for one in copied.parameters():
                one.fill_(0.5)
        assert torch.equal(model(images, 0), expected)


def train(case: Case, folder: Path | None, epochs: int) -> tuple[dict[str, torch.Tensor], list[set[str]]]:
    zen_worker.LARGE_ENTRIES = case.large  # type: ignore[misc]
    none = []
    strange: list[str] = []  # gradients that lie otherwise in memory than their parameters
    with opened(case.strategy, checkpoints=folder) as run:
        model, optimizer = built(case, case.optimizer)
        model, optimizer, loader = run.prepare(model, optimizer, data(), batch_size=BATCH, shuffle=False)
        for _ in run.epochs(epochs):
            for images, targets in loader:
                step = run.step
                run.backward(nn.functional.mse_loss(model(images, step), targets))
                if step in {0, STEPS_PER_EPOCH + 1}:
                    check_copies(model, optimizer, images)
                none.append(without_gradient(model))
                gradients = [(name, one, one.grad) for name, one in model.named_parameters()]
                strange += [n for n, one, g in gradients if type(g) is torch.Tensor and g.stride() != one.stride()]
                optimizer.step()
                optimizer.zero_grad()
                if case.write is not None and step >= STEPS_PER_EPOCH:
                    case.write(model)
        run.synchronize()
        trained = values(model)
        check_all_ranks_have(run, trained)
    assert strange == [], case.name
    return trained, none


def check(case: Case) -> None:
    folder = Path(sys.argv[2]) / case.name / str(PLACE.rank) if case.resumes else None
    if folder is not None:
        folder.mkdir(parents=True)
        train(case, folder, 1)
    trained, none = train(case, folder, EPOCHS)
    weights, none_alone = alone(case)
    assert none == none_alone[-len(none) :], case.name
    if not case.lossy:
        compare(case, trained, weights)


def compare(case: Case, trained: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    for name, expected in weights.items():
        said = f"{case.name}, {name}"
        torch.testing.assert_close(trained[name], expected, rtol=1e-3, atol=1e-5, msg=lambda t, it=said: f"{it}: {t}")


def refuse_other_strides() -> None:
    """Gradients are added up in their order in memory, as by DistributedDataParallel."""
    with opened("dense") as run:
        model = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last if PLACE.rank else torch.contiguous_format)
        with pytest.raises(BadInput, match=r"memory format .* on rank 1 differs from rank 0's"):
            run.prepare(model, plain_sgd(list(model.parameters())), data(), batch_size=BATCH)


refuse_other_strides()
failed = []
for one in CASES:
    if os.environ.get("ONLY", "") in one.name:
        try:
            check(one)
        except AssertionError as error:
            failed.append(str(error))
sys.exit("\n".join(failed) or None)
