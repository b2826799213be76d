"""Trains a small classifier under strategy groups; an update waits as long as a device would compute: UPDATE_S.

python groups_train.py OUT SLOWER ROUNDS. The last rank takes SLOWER times as long. Rank 0 writes a line for each round
to OUT/rounds.jsonl: seconds since its first round began, and the held-out loss of the model at its end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import atoll

UPDATE_S = 0.1
BATCH, ROUND_BATCHES, WORKERS = 32, 12, 4


def main() -> None:
    out, slower, rounds = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    run = atoll.init(seed=5)
    generator = torch.Generator().manual_seed(1)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
    for parameter in teacher.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    inputs = torch.randn(rounds * ROUND_BATCHES * WORKERS * BATCH + 2048, 32, generator=generator)
    with torch.no_grad():
        labels = teacher(inputs).argmax(1)
    data = torch.utils.data.TensorDataset(inputs[2048:], labels[2048:])
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 10))

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(UPDATE_S * (slower if run.rank == run.world_size - 1 else 1.0))  # the pretended work
        return nn.functional.cross_entropy(outputs, targets)

    def optimizer(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=2e-3)  # type: ignore[arg-type]

    train_round, loader = run.prepare_pipeline(model, optimizer, loss_of, data, BATCH, round_batches=ROUND_BATCHES)
    begun_s = time.monotonic()
    for _ in run.epochs(1):
        for each in loader:
            run.report(loss=train_round(each).item())
            if run.is_main:
                model.eval()
                with torch.no_grad(), (out / "rounds.jsonl").open("a") as file:
                    loss = nn.functional.cross_entropy(model(inputs[:2048]), labels[:2048]).item()
                    file.write(json.dumps({"s": time.monotonic() - begun_s, "loss": loss}) + "\n")
                model.train()


if __name__ == "__main__":
    main()
