from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.model.inputs import listed_optimizers, one_module
from atoll.agent.runtime.step.optimizers.sparse_gradients import refuse_dense_optimizers, refuse_sparse_modules
from atoll.agent.runtime.step.script_passes import check_loss
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
    for given in (model, (nn.Linear(1, 1).requires_grad_(False), model)):
        with pytest.raises(BadInput, match=says):
            one_module(given)


def test_several_models_are_one_and_stay_what_they_are() -> None:
    """One that is frozen, for a perceptual loss, trains nothing and is welcome beside one that does."""
    trained, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False).eval()
    together = one_module((trained, frozen))
    assert [name for name, _ in together.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (together.training, trained.training, frozen.training) == (True, True, False)
    assert one_module([trained]) is one_module(trained) is trained


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_layers_with_sparse_gradients_are_refused_by_name(layer: Any) -> None:
    refuse_sparse_modules(nn.Sequential(layer(3, 3)))
    with pytest.raises(BadInput, match=r"^0 makes sparse gradients.*sparse=False"):
        refuse_sparse_modules(nn.Sequential(layer(3, 3, sparse=True)))


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, None),
        (torch.optim.SGD, {"foreach": True}, None),
        (torch.optim.Adagrad, {}, None),
        (torch.optim.SparseAdam, {}, None),
        (torch.optim.SGD, {"weight_decay": 0.1}, r"add\(sparse, dense\)"),
        (torch.optim.SGD, {"fused": True}, "`_fused_sgd` does not support"),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, "weight_decay option is not compatible"),
        (torch.optim.Adam, {}, "consider SparseAdam"),
        (torch.optim.AdamW, {"fused": True}, "consider SparseAdam"),
        (torch.optim.RMSprop, {}, "RMSprop does not support"),
        (torch.optim.Adafactor, {}, "Adafactor does not support"),
        (torch.optim.Muon, {}, "Muon does not support"),
    ],
)
def test_optimizers_that_refuse_sparse_gradients_are_named_with_the_layer(
    kind: Any, settings: dict[str, Any], why: str | None
) -> None:
    """As plain torch has it at the first step, which the optimizer's state and the weights know nothing of."""
    model = nn.Sequential(nn.Embedding(3, 3, sparse=True), nn.Embedding(3, 3, sparse=True).requires_grad_(False))
    optimizer = kind(model[:1].parameters(), **settings)
    before = model[0].weight.detach().clone()  # type: ignore[operator]
    if why is None:
        refuse_dense_optimizers(model, [optimizer])
    else:
        with pytest.raises(BadInput, match=rf"^0 makes sparse gradients, which its {kind.__name__} refuses: .*{why}"):
            refuse_dense_optimizers(model, [optimizer])
    assert [id(one) for one in optimizer.state] in ([], [id(model[0].weight)])
    assert torch.equal(model[0].weight, before)  # type: ignore[arg-type]
    assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [id(model[0].weight)]
    dense = torch.optim.AdamW(nn.Sequential(nn.Embedding(3, 3)).parameters())
    refuse_dense_optimizers(nn.Sequential(nn.Embedding(3, 3)), [dense])


def test_optimizer_that_cannot_be_used_is_refused() -> None:
    model = nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    assert listed_optimizers(model, own) == [own]
    with pytest.raises(BadInput, match="2 parameters of group 0 of the SGD are not the model's.* all models"):
        listed_optimizers(model, (own, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)))
    with pytest.raises(BadInput, match="LBFGS"):
        listed_optimizers(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(BadInput, match=r"not a torch\.optim\.Optimizer.* go as tuples"):
        listed_optimizers(model, model)  # type: ignore[arg-type]
    for given in ((), (own, own)):
        with pytest.raises(BadInput, match="no optimizer, or the same one twice"):
            listed_optimizers(model, given)


def test_trained_parameters_that_the_optimizer_lacks_are_named() -> None:
    """1. Generator and discriminator are one module with two optimizers, and run.prepare gets one. 2. The other's
    moments would be in no checkpoint, and by stale-sparse its parameters on each rank others: it is refused by name.
    3. Frozen, they are nobody's."""
    discriminator = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    both = nn.ModuleDict({"generator": nn.Linear(2, 2), "discriminator": discriminator})
    optimizer = torch.optim.Adam(both["generator"].parameters())
    named = (
        r"4 parameters require .*: discriminator\.0\.weight, discriminator\.0\.bias, discriminator\.1\.weight, \.\.\."
    )
    with pytest.raises(BadInput, match=named):
        listed_optimizers(both, optimizer)
    other = torch.optim.Adam(discriminator.parameters())
    assert listed_optimizers(both, (optimizer, other)) == [optimizer, other]
    discriminator.requires_grad_(False)
    assert listed_optimizers(both, [optimizer]) == [optimizer]


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
