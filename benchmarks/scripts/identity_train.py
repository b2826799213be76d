"""One case of benchmarks/identity.py, on one rank: prints every loss as a hex float, and a digest of the weights after
every epoch. Runs on releases from 0.1 on, which called sparsity `rate`.

    python identity_train.py CASE    (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set)"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import atoll


@dataclass(frozen=True, slots=True)
class Case:
    exchange: str  # of stale-sparse; empty: dense
    adamw: bool = False  # else SGD with momentum
    clip: float = 0.0
    accumulate: int = 1
    values: str = "float16"

    def strategy(self) -> Any:
        """In step (staleness 0), so that no timing is in the result."""
        if not self.exchange:
            return "dense"
        settings: dict[str, Any] = {
            "exchange": self.exchange,
            "values": self.values,
            "digest_every": 2,
            "sparsity": 0.8,
        }
        return atoll.StaleSparse(staleness=0, **settings)


CASES: Final = {
    "dense": Case(""),
    "dense, AdamW, clipped, accumulated": Case("", adamw=True, clip=0.5, accumulate=2),
    "updates": Case("updates"),
    "updates, AdamW, clipped": Case("updates", adamw=True, clip=0.5),
    "gradients": Case("gradients"),
    "gradients, AdamW, clipped, accumulated": Case("gradients", adamw=True, clip=0.5, accumulate=2, values="float32"),
}


def digest(model: nn.Module) -> str:
    whole = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(whole).hexdigest()


def main() -> None:
    case = CASES[sys.argv[1]]
    run = atoll.init(seed=11, strategy=case.strategy())
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 300),
        nn.BatchNorm1d(300),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(300, 70),
        nn.Tanh(),
        nn.Linear(70, 1),
    )
    inputs = torch.randn(203, 16, generator=torch.Generator().manual_seed(5))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if case.adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=13)
    seen: list[str] = []
    for _ in run.epochs(3):
        for some, wanted in loader:
            loss = nn.functional.mse_loss(model(some), wanted)
            seen.append(float(loss.item()).hex())
            run.backward(loss)
            if (run.step + 1) % case.accumulate == 0 or run.last_batch:
                if case.clip:
                    run.clip_grad_norm(case.clip)
                optimizer.step()
                optimizer.zero_grad()
        seen.append(digest(model))
    print(json.dumps([*seen, digest(model)]), flush=True)


if __name__ == "__main__":
    main()
