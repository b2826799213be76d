from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.api.inputs import check_loss, check_model, check_optimizer, refuse_sparse_modules
from atoll.errors import BadInput


@pytest.mark.parametrize(
    ("model", "says"),
    [
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


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_layers_with_sparse_gradients_are_refused_by_name(layer: Any) -> None:
    refuse_sparse_modules(nn.Sequential(layer(3, 3)))
    with pytest.raises(BadInput, match=r"^0 makes sparse gradients.*sparse=False"):
        refuse_sparse_modules(nn.Sequential(layer(3, 3, sparse=True)))


def test_optimizer_that_cannot_be_used_is_refused() -> None:
    model = nn.Linear(2, 2)
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BadInput, match="2 parameters of the optimizer's group 0 are not the model's"):
        check_optimizer(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(BadInput, match="LBFGS"):
        check_optimizer(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(BadInput, match=r"not a torch\.optim\.Optimizer"):
        check_optimizer(model, model)  # type: ignore[arg-type]


def test_trained_parameters_that_the_optimizer_lacks_are_named() -> None:
    """1. Generator and discriminator are one module with two optimizers, and run.prepare gets one. 2. The other's
    moments would be in no checkpoint, and by stale-sparse its parameters on each rank others: it is refused by name.
    3. Frozen, they are nobody's."""
    both = nn.ModuleDict(
        {"generator": nn.Linear(2, 2), "discriminator": nn.Sequential(*map(nn.Linear, (2, 3), (3, 1)))}
    )
    optimizer = torch.optim.Adam(both["generator"].parameters())
    named = (
        r"4 parameters require .*: discriminator\.0\.weight, discriminator\.0\.bias, discriminator\.1\.weight, \.\.\."
    )
    with pytest.raises(BadInput, match=named):
        check_optimizer(both, optimizer)
    both["discriminator"].requires_grad_(False)
    check_optimizer(both, optimizer)


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
