"""What the adapters refuse, one line for each case in the file `refused`: its name and what was said. Started with
the library's name and the folder to work in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from atoll.errors import BadInput

DATA = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
Attempt = Callable[[], object]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


def lightning() -> dict[str, Attempt]:
    from atoll.adapters import lightning as adapter

    run = adapter.join(seed=3)
    import pytorch_lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            raise AssertionError("it trained")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)

    def fit(loader: Any, ckpt_path: str | None = None, **settings: Any) -> Attempt:
        settings = {"max_epochs": 1, **quiet, **settings}
        return lambda: pl.Trainer(strategy=adapter.AtollStrategy(run), **settings).fit(
            Module(), loader, ckpt_path=ckpt_path
        )

    loader = DataLoader(DATA, batch_size=4)
    before = pl.Trainer(accelerator="cpu", max_epochs=0, **quiet)
    before.fit(Module(), loader)
    before.save_checkpoint("weights.ckpt")
    scaled = SimpleNamespace(ckpt_path=None, precision="16-mixed", max_epochs=1, max_steps=-1)  # a CPU has none
    return {
        "two loaders": fit({"a": loader, "b": loader}),
        "no DataLoader": fit(Stream()),
        "stream": fit(DataLoader(Stream(), batch_size=4)),
        "ckpt_path": fit(loader, ckpt_path="weights.ckpt"),
        "16-mixed": lambda: adapter.RunEpochs(run, scaled, loader),
        "endless": fit(loader, max_epochs=-1),
    }


def huggingface() -> dict[str, Attempt]:
    from atoll.adapters import huggingface as adapter

    run = adapter.join(seed=3)
    from transformers import Trainer, TrainingArguments

    def attach(**settings: Any) -> Attempt:
        """settings: of the arguments, once transformers has checked them for this machine."""

        def attempt() -> None:
            arguments = TrainingArguments(output_dir="out", report_to=[], use_cpu=True)
            trainer = Trainer(model=nn.Linear(4, 1), args=arguments, train_dataset=DATA)
            for name, value in settings.items():
                setattr(arguments, name, value)
            adapter.attach(run, trainer)

        return attempt

    def smaller_batches() -> None:
        trainer: Any = SimpleNamespace(args=SimpleNamespace(num_train_epochs=1), callback_handler=None)
        training: Any = SimpleNamespace(last_batch=False)
        loader: Any = SimpleNamespace(batches_left=3, samples=DATA)
        epochs = adapter.TrainerEpochs(training, trainer, loader)
        state: Any = SimpleNamespace(global_step=2, max_steps=9)
        control: Any = SimpleNamespace(should_training_stop=False)
        epochs._due = epochs._epoch
        epochs.on_epoch_end(trainer.args, state, control)

    return {
        "accumulation": attach(gradient_accumulation_steps=2),
        "two GPUs": attach(_n_gpu=2),
        "fp16": attach(fp16=True),
        "other devices": attach(distributed_state=SimpleNamespace(num_processes=1, device=torch.device("meta"))),
        "processes": attach(distributed_state=SimpleNamespace(num_processes=2, device=torch.device("cpu"))),
        "smaller batches": smaller_batches,
        "too late": adapter.join,
    }


def accelerate() -> dict[str, Attempt]:
    from atoll.adapters import accelerate as adapter

    run = adapter.join(seed=3)
    from accelerate import Accelerator

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulating = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return {
        "accumulation": lambda: adapter.prepare(run, accumulating, model, optimizer, DataLoader(DATA, batch_size=4)),
        "too late": adapter.join,
    }


os.chdir(sys.argv[2])
refused = open("refused", "w")  # noqa: SIM115
for name, attempt in {"lightning": lightning, "huggingface": huggingface, "accelerate": accelerate}[
    sys.argv[1]
]().items():
    try:
        attempt()
    except BadInput as error:
        print(f"{name}: {error}", file=refused, flush=True)
