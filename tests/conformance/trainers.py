"""Conformance cases whose loop is made by a trainer of another framework, with Atoll's adapter or as it is.

Atoll is not imported here: a worker gives the adapter's module and the run that it joined. Each trainer is imported by
the first case that needs it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from cases import Case
from models import Batch, Samples
from optimizers import RECIPES
from program import EPOCHS, MAX_NORM, Driver, Outcome, Plain, loss_of_batch, state_of, untrained
from torch import nn
from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker's run, and the adapter of its trainer."""

    run: Any
    adapter: Any


class Alone(Plain):
    """Plain torch, whose steps are the model's calls."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, seed)
        self._begun = 0

    def begin_step(self, step: int) -> None:
        self.step = self._begun
        self._begun += 1


class WithLoss(nn.Module):
    """The case's model as trainers want it: what `forward` returns has the loss.

    Each call is a step, for these trainers accumulate nothing; `driver` says which one."""

    def __init__(self, case: Case, inner: nn.Module, driver: Driver) -> None:
        super().__init__()
        self.inner = inner
        self._case, self._driver = case, driver
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        self._driver.begin_step(self._driver.step)
        loss = loss_of_batch(self._case, self._driver, self.inner, (x, y, sample))
        self.losses.append(loss.item())
        return {"loss": loss}


def train(case: Case, driver: Driver, joined: Joined | None) -> Outcome:
    """Train the case's model by the trainer that its wrapper names. joined: None for the trainer as it is."""
    model, start, parameters = untrained(case, driver.seed)
    (optimizer,) = RECIPES[case.optimizer].make(model)
    wrapped = WithLoss(case, model, driver)
    TRAINERS[case.wrapper](case, wrapped, optimizer, joined)
    return Outcome(start, state_of(model), wrapped.losses, parameters)


def _huggingface(case: Case, model: WithLoss, optimizer: torch.optim.Optimizer, joined: Joined | None) -> None:
    forget_accelerates_state()
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=case.batch,
        max_grad_norm=_max_norm(case),
        lr_scheduler_type="linear",
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=Samples(case.samples),
        optimizers=(optimizer, None),
        data_collator=_named,
    )
    if joined is not None:
        joined.adapter.attach(joined.run, trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _named(rows: list[Batch]) -> Mapping[str, torch.Tensor]:
    return dict(zip(("x", "y", "sample"), (torch.stack(column) for column in zip(*rows, strict=True)), strict=True))


def _lightning(case: Case, model: WithLoss, optimizer: torch.optim.Optimizer, joined: Joined | None) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.model(*batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    trainer = pl.Trainer(
        **({"accelerator": "cpu", "devices": 1} if joined is None else {}),
        strategy="auto" if joined is None else joined.adapter.AtollStrategy(joined.run),
        max_epochs=EPOCHS,
        gradient_clip_val=_max_norm(case) or None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Samples(case.samples), case.batch))


def _accelerate(case: Case, model: WithLoss, optimizer: torch.optim.Optimizer, joined: Joined | None) -> None:
    forget_accelerates_state()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader: Any = DataLoader(Samples(case.samples), case.batch)
    if joined is None:
        called, stepped, loader = accelerator.prepare(model, optimizer, loader)
        epochs: Any = range(EPOCHS)
    else:
        called, stepped, loader = joined.adapter.prepare(joined.run, accelerator, model, optimizer, loader)
        epochs = joined.run.epochs(EPOCHS)
    for _ in epochs:
        for batch in loader:
            accelerator.backward(called(*batch)["loss"])
            if (norm := _max_norm(case)) > 0:
                accelerator.clip_grad_norm_(called.parameters(), norm)
            stepped.step()
            stepped.zero_grad()


def forget_accelerates_state() -> None:
    """It is made once in a process, where these cases are many."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _max_norm(case: Case) -> float:
    """Ranks that make updates of their own would each clip their own gradient."""
    return 0.0 if case.sums_updates else MAX_NORM


Trained = Callable[[Case, WithLoss, torch.optim.Optimizer, Joined | None], None]
TRAINERS: Final[Mapping[str, Trained]] = {
    "huggingface": _huggingface,
    "lightning": _lightning,
    "accelerate": _accelerate,
}
