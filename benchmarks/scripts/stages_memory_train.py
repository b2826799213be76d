"""Trains a byte GPT of 25 million parameters, in as many stages as the job has workers, under a limit of memory.

python stages_memory_train.py OUT LIMIT_MIB ROUNDS. LIMIT_MIB: what the process may allocate from here on; 0: no limit.
Rank R leaves in OUT/rank-R.json the losses of its rounds and the most that it had resident beyond what it began
with."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn

import atoll

CONTEXT, WIDTH, HEADS, LAYERS = 64, 512, 8, 8
BATCH, MICRO_BATCHES, ROUND_BATCHES = 8, 4, 2


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_byte, self.of_place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        return self.of_byte(bytes_BT) + self.of_place(torch.arange(bytes_BT.shape[1]))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, inputs_BTC: torch.Tensor) -> torch.Tensor:
        mask_TT = nn.Transformer.generate_square_subsequent_mask(inputs_BTC.shape[1])
        return self.layer(inputs_BTC, src_mask=mask_TT, is_causal=True)  # type: ignore[no-any-return]


def loss_of(outputs_BTC: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs_BTC.flatten(0, 1), targets_BT.flatten())


def of_this_process(name: str) -> int:
    """Bytes, by /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def main() -> None:
    out, limit_mib, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    run = atoll.init(seed=1)
    began = of_this_process("VmRSS")
    if limit_mib:
        most = of_this_process("VmData") + limit_mib * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    text_T = torch.randint(0, 256, (rounds * ROUND_BATCHES * BATCH, CONTEXT + 1), generator=torch.manual_seed(2))
    text_T[:, 1::2] = text_T[:, :-1:2]  # every other byte can be learnt
    train_round, loader = run.prepare_pipeline(
        [Embedding, *[Block] * LAYERS, lambda: nn.Linear(WIDTH, 256)],
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        loss_of,
        torch.utils.data.TensorDataset(text_T[:, :-1], text_T[:, 1:]),
        BATCH,
        MICRO_BATCHES,
        round_batches=ROUND_BATCHES,
    )
    losses = []
    for _ in run.epochs(1):
        for each in loader:
            losses.append(train_round(each).item())
            run.report(loss=losses[-1])
    told = {"losses": losses, "resident_bytes": of_this_process("VmHWM") - began}
    (out / f"rank-{run.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
