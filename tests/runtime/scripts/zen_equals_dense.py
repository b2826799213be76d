"""Strategy zen trains what strategy dense trains, and what one process trains on the whole batch.

Started with a port for each run. Batches of 7 and a last of 1 make unequal parts, empty ones too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from several_runs import check_all_ranks_have, opened
from torch import nn

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.planning.sparse_scheme import SCHEMES
from atoll.strategies.declaration import StrategySettings
from atoll.strategies.zen.settings import Zen

SAMPLES, BATCH, WORDS = 29, 7, 300
RANKS: Final = WorkerPlace.from_environment().world_size


class Model(nn.Module):
    """A table, a bag of another, a dense layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 12, padding_idx=0, sparse=sparse)
        self.bag = nn.EmbeddingBag(WORDS, 5, mode="sum", sparse=sparse)
        self.last = nn.Linear(17, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.table(words).mean(dim=1), self.bag(words)], dim=1))


class Tables(nn.Module):
    """Sparse gradients alone, as SparseAdam takes them; one table has rows of one entry, one has no gradient where no
    sample asks for it."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 3, sparse=sparse)
        self.scale = nn.Embedding(WORDS, 1, sparse=sparse)
        self.rare = nn.Embedding(4, 3, sparse=sparse)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        said = self.table(words).mean(dim=1) * (1 + self.scale(words)).mean(dim=1)
        hits = (words < 20).any(dim=1).nonzero()[:, 0]
        return said.index_add(0, hits, self.rare(words[hits].amin(dim=1) % 4)) if len(hits) else said


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[..., nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    clip_norm: float = 0.0


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.03)


PLAIN: Final = Case("SGD", Model, sgd)
CASES: Final = (
    Case("SparseAdam", Tables, lambda p: torch.optim.SparseAdam(p, lr=0.05)),
    Case("clipping", Model, sgd, clip_norm=0.05),
)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    words = (20 + torch.rand(SAMPLES, 6, generator=generator) ** 3 * (WORDS - 20)).long()
    words[0, :] = words[0, 0]  # one word several times in a sample
    words[[3, 17, 18, 28], 2] = torch.tensor([7, 0, 11, 3])
    return torch.utils.data.TensorDataset(words, torch.randn(SAMPLES, 3, generator=generator))


def built(case: Case, *, sparse: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = case.model(sparse=sparse)
    return model, case.optimizer(list(model.parameters()))


def train(case: Case, strategy: str | StrategySettings, *, sparse: bool) -> dict[str, torch.Tensor]:
    with opened(strategy) as run:
        model, optimizer = built(case, sparse=sparse)
        model, optimizer, loader = run.prepare(model, optimizer, data(), batch_size=BATCH, shuffle=False)
        for _ in run.epochs(1):
            for words, targets in loader:
                run.backward(nn.functional.mse_loss(model(words), targets))
                for name, one in model.named_parameters():
                    if sparse and one.grad is not None and not name.startswith("last"):
                        assert one.grad.is_sparse, name
                        assert one.grad.is_coalesced(), name
                        at = one.grad.indices()[0]
                        assert bool((at[1:] > at[:-1]).all()), name
                if case.clip_norm:
                    assert (norm := run.clip_grad_norm(case.clip_norm)) is not None
                    assert norm > case.clip_norm
                optimizer.step()
                optimizer.zero_grad()
        trained = {name: one.detach().clone() for name, one in model.named_parameters()}
        check_all_ranks_have(run, trained)
    return trained


def alone(case: Case) -> dict[str, torch.Tensor]:
    """In this process, with the whole batch."""
    model, optimizer = built(case, sparse=True)
    words, targets = data().tensors
    for begin in range(0, SAMPLES, BATCH):
        nn.functional.mse_loss(model(words[begin : begin + BATCH]), targets[begin : begin + BATCH]).backward()
        if case.clip_norm:  # torch's own takes no sparse gradients
            dense = [one.grad.to_dense() for one in model.parameters() if one.grad is not None]
            factor = min(1.0, case.clip_norm / (torch.cat([one.flatten() for one in dense]).norm().item() + 1e-6))
            for one in model.parameters():
                one.grad = one.grad * factor if one.grad is not None else None
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def check(case: Case) -> None:
    zen = train(case, Zen(scheme="zen"), sparse=True)
    torch.testing.assert_close(zen, alone(case), rtol=1e-4, atol=1e-6, msg=lambda text: f"{case.name}: {text}")


def check_every_scheme() -> None:
    """Against dense, with sparse gradients, and by a scheme of units and one of blocks with dense ones, mostly zero."""
    dense = train(PLAIN, "dense", sparse=False)
    for scheme in SCHEMES:
        for sparse in (True, False) if scheme in {"zen", "omnireduce"} else (True,):
            zen = train(PLAIN, Zen(scheme=scheme), sparse=sparse)
            torch.testing.assert_close(zen, dense, rtol=1e-5, atol=1e-7, msg=lambda text, it=scheme: f"{it}: {text}")


for one in CASES:
    check(one)
check_every_scheme()
print(f"{len(CASES)} cases and {len(SCHEMES)} schemes agree on {RANKS} ranks", file=sys.stderr)
