"""Submitted by benchmarks/copies.py: a network whose passes wait as long as a device would compute, trained until the
job is cancelled, while every rank tells what leaves its machine.

python copies_thin_train.py FOLDER WIDTH PACE_S. Each rank writes a JSON line about twice a second into FOLDER.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from checkpoints_train import make
from paced_train import waited
from torch import nn

import atoll

BATCH = 8  # of all workers: little is computed, so that two cores do not lie
EVERY_S = 0.5


def main() -> None:
    folder, width, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    run = atoll.init(seed=1)
    model, dataset = make(width)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=BATCH)
    training: Any = run._training
    tier: Any = training.state.memory
    told_s = 0.0
    with Path(folder, f"rank-{run.rank}.jsonl").open("a") as log:
        for _ in run.epochs(1_000_000):
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(waited(model(inputs), pace_s / 3, 2 * pace_s / 3), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if time.monotonic() - told_s < EVERY_S:
                    continue
                told_s = time.monotonic()
                sender = tier._sender  # none with one replica
                line = {
                    "at_s": told_s,
                    "step": run.step,
                    "parameters": parameters,
                    "complete_step": tier.complete_step,
                    "copied_bytes": sender.sent_bytes if sender is not None else 0,
                    "beside_bytes": sum(sender.copied_beside.values()) if sender is not None else 0,
                    "state_bytes": sender._transfer.total if sender is not None and sender._transfer is not None else 0,
                    "busy_s": sum(link.busy_s for link in training._current.driver.coordination.channel.link_samples()),
                    "exchange_bytes": training._current.driver.coordination.channel.sent_bytes(),
                    "device_bytes": int(Path("/sys/class/net/wan0/statistics/tx_bytes").read_text()),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()


if __name__ == "__main__":
    main()
