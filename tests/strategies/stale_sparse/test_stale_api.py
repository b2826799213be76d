"""Strategy stale-sparse alone and in this process: what it refuses and what it allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn

import atoll
from atoll.errors import BadInput, SettingError

Exchange = Literal["updates", "gradients"]
DATA = torch.utils.data.TensorDataset(torch.arange(80.0).view(20, 4) / 80, torch.arange(20.0).view(20, 1) / 20)


class Job:
    """A small model, trained alone."""

    def __init__(self) -> None:
        self.run: atoll.Run | None = None

    def prepare(
        self,
        exchange: Exchange = "gradients",
        make: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self.run = atoll.init(seed=5, strategy=atoll.StaleSparse(exchange=exchange, **{"sparsity": 0.5} | settings))
        self.model = model if model is not None else nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 1))
        self.optimizer = make(self.model) if make else torch.optim.SGD(self.model.parameters(), lr=0.05)
        _, _, self.loader = self.run.prepare(self.model, self.optimizer, DATA, batch_size=5)

    def batches(self, epochs: int = 1) -> Iterator[torch.Tensor]:
        """The loss of each batch."""
        assert self.run is not None
        for _ in self.run.epochs(epochs):
            for inputs, labels in self.loader:
                yield nn.functional.mse_loss(self.model(inputs), labels)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    if job.run is not None:
        job.run.close()


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
@pytest.mark.parametrize("own", [False, True], ids=["run.backward", "loss.backward"])
def test_alone_it_learns(job: Job, exchange: Exchange, own: bool) -> None:
    job.prepare(exchange)
    assert job.run is not None
    losses = []
    for loss in job.batches(30):
        if own:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            job.run.backward(loss)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.2 * sum(losses[:4])
    statistics = job.run.statistics()
    assert statistics["sparsity"] == 0.5
    assert 0 < statistics["chosen_blocks"] < statistics["all_blocks"]


def test_an_optimizer_without_a_sparse_form_is_refused_by_gradients_only(job: Job) -> None:
    with pytest.raises(BadInput, match=r"no sparse form of Adagrad.* strategy dense"):
        job.prepare("gradients", lambda model: torch.optim.Adagrad(model.parameters()))
    assert job.run is not None
    job.run.close()
    job.prepare("updates", lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05))
    losses = [step(job, loss) for loss in job.batches(10)]
    assert losses[-1] < losses[0]


def step(job: Job, loss: torch.Tensor) -> float:
    assert job.run is not None
    job.run.backward(loss)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_a_parameter_that_no_group_of_the_optimizer_has_is_named(job: Job, exchange: Exchange) -> None:
    """By updates such a parameter had no shared parameter: whoever moved it made ranks differ, and no digest told."""
    with pytest.raises(BadInput, match=r"1 parameters require a gradient and are no optimizer's: 0\.weight\."):
        job.prepare(exchange, lambda model: torch.optim.SGD([*model.parameters()][1:], lr=0.1))


def test_parameters_that_come_to_the_optimizer_later_are_refused(job: Job) -> None:
    job.prepare()
    assert job.run is not None
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    for loss in job.batches():
        job.run.backward(loss)
        with pytest.raises(BadInput, match="got other parameters after run.prepare"):
            job.optimizer.step()
        break


@pytest.mark.parametrize(
    "use",
    [
        lambda job: nn.utils.clip_grad_norm_(job.model.parameters(), 1.0),
        lambda job: nn.utils.clip_grad_value_(job.model.parameters(), 1.0),
        lambda job: scaled(job.optimizer),
        lambda job: job.model[0].weight.grad.abs().max(),
        lambda job: job.model[0].weight.grad.mul_(0.5),
    ],
    ids=["clip_grad_norm_", "clip_grad_value_", "GradScaler", "reading", "writing"],
)
def test_taken_gradients_cannot_be_used_unawares(job: Job, use: Callable[[Job], object]) -> None:
    job.prepare("gradients")
    assert job.run is not None
    for loss in job.batches():
        job.run.backward(loss)
        with pytest.raises(BadInput, match=r"are not in p\.grad afterwards"):
            use(job)
        break


def scaled(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_clipping_belongs_between_backward_and_step(job: Job, exchange: Exchange) -> None:
    """By updates torch's own clipping works too."""
    job.prepare(exchange)
    assert job.run is not None
    for loss in job.batches():
        with pytest.raises(BadInput, match="before run.backward"):
            job.run.clip_grad_norm(1.0)
        job.run.backward(loss)
        with pytest.raises(BadInput, match="must be above 0"):
            job.run.clip_grad_norm(0.0)
        norm = job.run.clip_grad_norm(1e-3)
        if exchange == "updates":
            assert norm is not None
            assert nn.utils.clip_grad_norm_(job.model.parameters(), 1.0) <= 1e-3
        before = [one.detach().clone() for one in job.model.parameters()]
        job.optimizer.step()
        job.run.synchronize()
        moved = sum(((one - old) ** 2).sum() for one, old in zip(job.model.parameters(), before, strict=True)) ** 0.5
        assert 0 < moved <= 0.05 * 1e-3 * 1.001
        break


def test_two_losses_in_one_pass_are_named(job: Job) -> None:
    job.prepare("gradients")
    assert job.run is not None
    for loss in job.batches():
        with pytest.raises(BadInput, match=r"got two gradients in one pass"):
            job.run.backward(TwoPasses.apply(job, loss))
        break


class TwoPasses(torch.autograd.Function):
    """What reentrant activation checkpointing does: a backward pass inside the backward pass."""

    @staticmethod
    def forward(context: Any, job: Job, loss: torch.Tensor) -> torch.Tensor:
        context.job = job
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        with torch.enable_grad():
            context.job.model(torch.ones(2, 4)).sum().backward()
        return None, gradient


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_sparse_gradients_and_strange_memory_are_refused(job: Job, exchange: Exchange) -> None:
    strange = nn.Linear(4, 1)
    strange.weight = nn.Parameter(torch.zeros(1, 8)[:, ::2])
    with pytest.raises(BadInput, match=r"parameter weight is torch\.float32.*needs dense"):
        job.prepare(exchange, model=strange)
    assert job.run is not None
    job.run.close()
    job.prepare(exchange, model=Table())
    for _ in job.run.epochs(1):
        for _ in job.loader:
            with pytest.raises(BadInput, match=r"sparse gradient; build its embedding with sparse=False"):
                job.run.backward(job.model(torch.tensor([1, 2])).sum())
            return


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.rows, sparse=True)


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_a_step_without_a_pass_changes_nothing(job: Job, exchange: Exchange) -> None:
    job.prepare(exchange)
    for loss in job.batches():
        step(job, loss)
        assert job.run is not None
        job.run.synchronize()
        before = [one.detach().clone() for one in job.model.parameters()]
        job.optimizer.step()
        job.run.synchronize()
        assert all(torch.equal(one, old) for one, old in zip(job.model.parameters(), before, strict=True))
        break


def test_synchronizing_in_the_middle_of_a_step_is_refused(job: Job) -> None:
    job.prepare("updates")
    assert job.run is not None
    for loss in job.batches():
        job.run.backward(loss)
        with pytest.raises(BadInput, match="run.synchronize between run.backward and optimizer.step"):
            job.run.synchronize()
        break


def test_settings_without_a_meaning_are_refused_before_anything_is_made(job: Job) -> None:
    with pytest.raises(SettingError, match="sparsity = 1.5"):
        job.prepare(sparsity=1.5)
    with pytest.raises(SettingError, match="error_feedback"):
        job.prepare("updates", error_feedback=False)


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_the_script_writes_are_refused_where_no_shared_parameter_takes_them(
    job: Job, through_data: bool
) -> None:
    """Clamped weights never reached the shared parameters, and workers differed after run.synchronize()."""
    job.prepare("gradients")
    assert job.run is not None
    steps = 0

    def train() -> None:
        nonlocal steps
        for loss in job.batches(2):
            assert job.run is not None
            job.run.backward(loss)
            job.optimizer.step()
            job.optimizer.zero_grad()
            steps += 1
            with torch.no_grad():
                weights = job.model[0].weight
                (weights.data if through_data else weights).clamp_(-0.1, 0.1)

    with pytest.raises(BadInput, match=r'the script wrote parameter 0\.weight .* Use exchange = "updates"'):
        train()
    # At an epoch's end, of the first one that has blocks which no later round wrote anew; else at the next step.
    assert steps in ({4, 8} if through_data else {1})


def test_shared_values_that_a_pass_uses_are_not_to_be_written(job: Job) -> None:
    """Gradients at the shared parameters: what is written between forward pass and update was dropped."""
    job.run = atoll.init(seed=5, strategy=atoll.LocalSteps(gradients="shared_params"))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    _, _, loader = job.run.prepare(model, optimizer, DATA, batch_size=5)
    inputs, labels = next(iter(loader))
    job.run.backward(nn.functional.mse_loss(model(inputs), labels))
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)
    with pytest.raises(BadInput, match=r"the script wrote parameter weight between its forward pass"):
        optimizer.step()
