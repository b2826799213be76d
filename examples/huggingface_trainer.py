"""A GPT-2 from its config, trained by an unmodified transformers.Trainer on Atoll's data plane. No downloads.

atoll submit examples/huggingface_trainer.py --workers 2:4 --follow -- --epochs 20
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset

from atoll.adapters import huggingface

run = huggingface.join(seed=3)  # before TrainingArguments

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=12, help="sequences of the whole job")
options = parser.parse_args()


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from another number each."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


config: Any = GPT2Config(
    vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",  # checkpoints are Atoll's
        report_to=[],
        disable_tqdm=True,
        use_cpu=run.device.type == "cpu",
    ),
    train_dataset=Counting(),
)
huggingface.attach(run, trainer)
trainer.train()
