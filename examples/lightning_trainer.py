"""A LightningModule, trained by an unmodified Trainer on Atoll's data plane. No downloads.

atoll submit examples/lightning_trainer.py --workers 2:4 --follow -- --epochs 20
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from atoll.adapters import lightning as adapter

run = adapter.join(seed=3)  # before the Trainer

import pytorch_lightning as pl  # noqa: E402
from pytorch_lightning.callbacks import EarlyStopping  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=12, help="samples of the whole job")
parser.add_argument("--accumulate", type=int, default=1, help="batches of an update")
options = parser.parse_args()


class Regression(pl.LightningModule):  # type: ignore[misc]
    """Learns the tanh of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("learning_rate", self.optimizers().param_groups[0]["lr"])
        self.log("index", float(index))
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("validation_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def samples(seed: int) -> TensorDataset:
    inputs = torch.randn(48, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


trainer = pl.Trainer(
    strategy=adapter.AtollStrategy(run),
    max_epochs=options.epochs,
    accumulate_grad_batches=options.accumulate,
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    callbacks=[EarlyStopping("validation_loss", patience=100)],
    logger=False,
    enable_checkpointing=False,  # checkpoints are Atoll's
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    Regression(),
    DataLoader(samples(1), batch_size=options.batch, shuffle=True),
    DataLoader(samples(2), batch_size=48),
)
