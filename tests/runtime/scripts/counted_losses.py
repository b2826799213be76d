"""Losses that are no mean over a rank's samples, at unequal shares: python counted_losses.py PORTS.

Beside each run one process's worth of plain torch trains the same model on the whole batch. Batches of 7 and a last of
1 make unequal parts, empty ones too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
from several_runs import opened
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import atoll
from atoll.errors import BadInput
from atoll.strategies.declaration import StrategySettings

EXACT: Any = {"staleness": 0, "values": "float32"}
STRATEGIES: Final[dict[str, StrategySettings | str]] = {
    "dense": "dense",
    "compressed": atoll.Compressed(min_bytes=1 << 30),  # nothing is
    "stale-sparse by gradients": atoll.StaleSparse(exchange="gradients", sparsity=0.0, **EXACT),
    "local-steps": atoll.LocalSteps(density=1.0, **EXACT),
}
SAMPLES, BATCH, TOKENS, WORDS = 29, 7, 5, 11
generator = torch.Generator().manual_seed(3)
IDS = torch.arange(SAMPLES)
INPUTS = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=generator)
TARGETS = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=generator)
TARGETS[torch.arange(TOKENS) >= (IDS % (TOKENS + 1))[:, None]] = -100  # 0 to 5 tokens count


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS)
        self.image, self.text = nn.Linear(12, 6), nn.Linear(12, 6)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.table(words)))
        return out

    def features(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.tanh(self.table(words)).mean(dim=1)
        return functional.normalize(self.image(mean), dim=-1), functional.normalize(self.text(mean.cos()), dim=-1)


def token_loss(model: nn.Module, ids: torch.Tensor, reduction: str) -> torch.Tensor:
    return functional.cross_entropy(model(INPUTS[ids]).flatten(0, 1), TARGETS[ids].flatten(), reduction=reduction)


def contrastive(model: Words, images: torch.Tensor, texts: torch.Tensor, all_texts: torch.Tensor, first: int) -> Any:
    """Of these images with the texts of all: each belongs to the one at its own place."""
    logits = model.temperature.exp() * images @ all_texts.T
    return functional.cross_entropy(logits, first + torch.arange(len(images)))


Pass = Callable[[atoll.Run, Words, torch.Tensor], None]


def token_mean(run: atoll.Run, model: Words, ids: torch.Tensor) -> None:
    run.backward(token_loss(model, ids, "mean"), weight=(TARGETS[ids] >= 0).sum())


def summed(run: atoll.Run, model: Words, ids: torch.Tensor) -> None:
    run.backward(token_loss(model, ids, "sum"), reduction="sum")


def gathered(run: atoll.Run, model: Words, ids: torch.Tensor) -> None:
    images, texts = model.features(INPUTS[ids])
    all_texts, first = run.gather_for_loss(texts)
    run.backward(contrastive(model, images, texts, all_texts, first))


def whole_token_mean(model: Words, batches: list[torch.Tensor]) -> torch.Tensor:
    """Over all tokens of an update."""
    return token_loss(model, torch.cat(batches), "mean")


def whole_sum(model: Words, batches: list[torch.Tensor]) -> torch.Tensor:
    return token_loss(model, torch.cat(batches), "sum")


def whole_contrastive(model: Words, batches: list[torch.Tensor]) -> torch.Tensor:
    """The sum over batches of their own."""
    losses = []
    for ids in batches:
        images, texts = model.features(INPUTS[ids])
        losses.append(contrastive(model, images, texts, texts, 0))
    return torch.stack(losses).sum()


LOSSES: Final[dict[str, tuple[Pass, Callable[[Words, list[torch.Tensor]], torch.Tensor], float]]] = {
    "a mean over tokens": (token_mean, whole_token_mean, 0.2),
    "a sum over tokens": (summed, whole_sum, 0.02),
    "a loss over gathered features": (gathered, whole_contrastive, 0.2),
}
"""Each with its learning rate."""
MEAN, SUM, GATHERED = LOSSES
EPOCHS: Final = ((MEAN, 1), (MEAN, 3), (SUM, 1), (GATHERED, 3))
"""A loss, and the passes of an update."""


def compare(strategy: str) -> None:
    """In one run, an epoch for each of EPOCHS."""
    with opened(STRATEGIES[strategy]) as run:
        model = Words()
        reference = copy.deepcopy(model)
        momentum = 0.0 if "gradients" in strategy else 0.9  # blocks of zeros have none in a step there
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.2, momentum=momentum) for one in (model, reference)]
        _, optimizer, loader = run.prepare(model, optimizers[0], TensorDataset(IDS), batch_size=BATCH)
        optimizers[0] = optimizer
        for epoch in run.epochs(len(EPOCHS)):
            loss, accumulate = EPOCHS[epoch]
            trains, whole, rate = LOSSES[loss]
            for one in optimizers:
                one.param_groups[0]["lr"] = rate
            batches: list[torch.Tensor] = []
            empty = 0
            for index, (ids,) in enumerate(loader):
                assert loader.current is not None
                counts = loader.current.weight > 0
                empty += not counts
                batches.append(run.gather(ids if counts else ids[:0]))
                update = (index + 1) % accumulate == 0 or run.last_batch
                with nullcontext() if update else run.no_sync():
                    trains(run, model, ids)
                if not update:
                    continue
                whole(reference, batches).backward()
                batches.clear()
                for one in optimizers:
                    one.step()
                    one.zero_grad()
            (some_were_empty,) = run.sum(empty)
            assert some_were_empty or run.world_size == 1
            run.synchronize()
            label = f"{strategy}, {loss}, {accumulate} passes"
            actual, expected = dict(model.named_parameters()), dict(reference.named_parameters())
            torch.testing.assert_close(
                actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text, label=label: f"{label}: {text}"
            )


def what_means_nothing_is_refused() -> None:
    with opened("dense") as run:
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer, loader = run.prepare(model, optimizer, TensorDataset(IDS), batch_size=BATCH)
        with pytest.raises(BadInput, match="outside the loop over the loader"):
            run.gather_for_loss(torch.zeros(2, 3))
        for _ in run.epochs(1):
            for (ids,) in loader:
                loss = token_loss(model, ids, "sum")
                for wrong in (-1.0, float("nan")):
                    with pytest.raises(BadInput, match=r"got weight = .*; it must be a number of 0 or more"):
                        run.backward(loss, weight=wrong)
                with pytest.raises(BadInput, match="a sum has no weight"):
                    run.backward(loss, weight=1.0, reduction="sum")
                with pytest.raises(BadInput, match=r"takes a tensor of rows"):
                    run.gather_for_loss(torch.zeros(()))
                with run.no_sync():
                    run.backward(token_loss(model, ids, "sum"), weight=1.0)
                    with pytest.raises(BadInput, match=r"Give it in all of them, or in none"):
                        run.backward(token_loss(model, ids, "sum"))
                run.backward(token_loss(model, ids, "sum"), weight=1.0)
                with (
                    run.no_sync(),
                    pytest.raises(BadInput, match=r"after a pass of the same update that was exchanged"),
                ):
                    run.backward(token_loss(model, ids, "sum"), weight=1.0)
                optimizer.step()
                optimizer.zero_grad()
                break


if __name__ == "__main__":
    what_means_nothing_is_refused()
    for chosen in STRATEGIES:
        compare(chosen)
        print(f"{chosen}: agrees", flush=True)
