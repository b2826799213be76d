"""Trainers of other frameworks evaluate under local-steps: python adapter_evaluations.py huggingface|lightning.

Each worker evaluates all samples by itself. At weights that all share it finds the same as the others, to the bit."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll

STRATEGY = atoll.LocalSteps(density=0.05)
INPUTS = torch.randn(60, 16, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS.sum(dim=1, keepdim=True).tanh()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(inputs), targets)}


def check(run: atoll.Run, model: nn.Module, found: list[float]) -> None:
    """Of each evaluation all ranks found the same, though their own weights differed."""
    assert len(found) == 3
    ranks = run.gather(torch.tensor([found], dtype=torch.float64))
    assert torch.equal(ranks[0], ranks[1]), ranks


def huggingface() -> None:
    from atoll.adapters import huggingface as adapter

    run = adapter.join(seed=3, strategy=STRATEGY)
    from transformers import Trainer, TrainingArguments

    rows: list[Any] = [{"inputs": one, "targets": other} for one, other in zip(INPUTS, TARGETS, strict=True)]
    folder = tempfile.mkdtemp()
    args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=3,
        per_device_train_batch_size=12,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no",
        label_names=["targets"],
        remove_unused_columns=False,
        prediction_loss_only=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model = Network()
    trainer = Trainer(model=model, args=args, train_dataset=rows[:40], eval_dataset=rows[40:])
    adapter.attach(run, trainer)
    trainer.train()
    check(run, model, [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one][:3])


def lightning() -> None:
    from atoll.adapters import lightning as adapter

    run = adapter.join(seed=3, strategy=STRATEGY)
    import pytorch_lightning as pl

    found: list[float] = []

    class Regression(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.network(*batch)["loss"]  # type: ignore[no-any-return]

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            if not self.trainer.sanity_checking:
                found.append(self.network(*batch)["loss"].item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = pl.Trainer(
        strategy=adapter.AtollStrategy(run),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    training = DataLoader(TensorDataset(INPUTS[:40], TARGETS[:40]), batch_size=12)
    trainer.fit(model, training, DataLoader(TensorDataset(INPUTS[40:], TARGETS[40:]), batch_size=20))
    check(run, model, found)


if __name__ == "__main__":
    huggingface() if sys.argv[1] == "huggingface" else lightning()
