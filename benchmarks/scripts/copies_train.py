"""Submitted by benchmarks/copies.py: a network whose passes wait as long as a device would compute, trained in blocks
of steps with checkpoints in memory and without, in turn.

python copies_train.py OUT BLOCKS WIDTH PACE_S. Rank 0 writes what each step took, and what the tier says of itself.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from blocks import train_in_blocks
from checkpoints_train import make
from paced_train import NOISE, waited
from torch import nn

import atoll

BATCH = 64
WARM_BLOCKS = 4  # idle spans are learned, memory is taken, the first plan comes


def main() -> None:
    out, blocks, width, pace_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    run = atoll.init(seed=1)
    model, dataset = make(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=BATCH)
    tier: Any = run._training.state.memory  # type: ignore[union-attr]
    written: list[int] = []
    begun_step = 0

    def turn(block: int) -> None:
        without = block >= WARM_BLOCKS and block % 2 == 1
        tier._paused = lambda step: without
        written.append(0)

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal begun_step
        if tier._begun_step != begun_step:
            begun_step, written[-1] = tier._begun_step, written[-1] + 1
        work_s = pace_s * random.lognormvariate(0.0, NOISE)
        return nn.functional.cross_entropy(waited(model(inputs), work_s / 3, 2 * work_s / 3), labels)

    # In a block's first two steps a generation of the one before may still be on its way.
    took = train_in_blocks(run, optimizer, loader, loss, blocks=blocks, turn=turn, left_out=2)
    if run.is_main:
        path = next((one.path for one in tier._sender._outgoing.values()), None)
        told = {
            "took": took[WARM_BLOCKS:],
            "written": written[WARM_BLOCKS:],
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "state_bytes": tier._shard.layout.total,
            "every": tier._cadence.every,
            "cost_s": tier._cadence.cost_s,
            "copied_bytes": tier._sender.sent_bytes,
            "spans_s": tier._sender._spans.profile(),
            "bandwidth": path.bandwidth if path is not None else None,
        }
        out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
