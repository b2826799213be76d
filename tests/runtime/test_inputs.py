from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from atoll.agent.runtime.inputs import LoaderSettings, check_loss, check_model, check_optimizer
from atoll.errors import BadInput

DATA = TensorDataset(torch.zeros(20, 2))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (LoaderSettings(dataset=DATA, batch_size=2), "at least the number of workers .3."),
        (LoaderSettings(dataset=DATA, batch_size=4.0), "batch_size = 4.0 must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_unusable_batch_size_is_named_with_the_way_out(settings: LoaderSettings, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        settings.check(3)


def test_settings_of_a_dataloader_are_taken_over() -> None:
    def collate(rows: list[Any]) -> list[Any]:
        return rows

    given = DataLoader(DATA, batch_size=5, shuffle=False, num_workers=2, collate_fn=collate, drop_last=True)
    settings = LoaderSettings.from_dataloader(given, None)
    assert (settings.dataset, settings.batch_size, settings.shuffle) == (DATA, 5, False)
    assert (settings.num_workers, settings.collate_fn, settings.drop_last) == (2, collate, True)
    assert LoaderSettings.from_dataloader(DataLoader(DATA, shuffle=True), 6).shuffle
    assert LoaderSettings.from_dataloader(DataLoader(DATA), 6).batch_size == 6


def test_dataloader_that_draws_in_its_own_way_is_refused() -> None:
    sampler = WeightedRandomSampler([1.0] * 20, 20)
    with pytest.raises(BadInput, match="its own WeightedRandomSampler"):
        LoaderSettings.from_dataloader(DataLoader(DATA, batch_size=4, sampler=sampler), None)
    with pytest.raises(BadInput, match="Pass the dataset and batch_size"):
        LoaderSettings.from_dataloader(DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), None)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Embedding(3, 3, sparse=True), "sparse=False"),
        (nn.Sequential(nn.LazyLinear(3)), "run one batch through the model"),
        (nn.Linear(2, 2, dtype=torch.complex64), "only real floating-point"),
        (nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (nn.DataParallel(nn.Linear(2, 2)), "pass the bare model"),
        ("model.pt", "not a torch.nn.Module"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_model_that_cannot_be_trained_is_refused(model: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        check_model(model)


def test_optimizer_that_cannot_be_used_is_refused() -> None:
    model = nn.Linear(2, 2)
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BadInput, match="2 parameters of the optimizer's group 0 are not the model's"):
        check_optimizer(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(BadInput, match="LBFGS"):
        check_optimizer(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(BadInput, match=r"not a torch\.optim\.Optimizer"):
        check_optimizer(model, model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (torch.zeros(3, requires_grad=True), r"shape \(3,\); it must be one number"),
        (torch.zeros(()), "has no gradient"),
        (0.5, "without .item"),
    ],
)
def test_loss_that_is_none_is_refused(loss: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        check_loss(loss)
