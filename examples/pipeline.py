"""A transformer over bytes in two stages, each on a worker of its own: neither holds the model alone.

    atoll up --agents 2
    atoll submit --config examples/pipeline.toml --follow

It reads a text of Python's own library. Alone (`python examples/pipeline.py`) one process trains the same model."""

from __future__ import annotations

import pathlib

import torch
from torch import nn

import atoll

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 6


class Bytes(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text, and the bytes that follow each of theirs."""

    def __init__(self) -> None:
        text = pathlib.Path(pathlib.__file__).with_name("argparse.py")
        self.bytes = torch.tensor(list(text.read_bytes() if text.exists() else bytes(range(256)) * 256))

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_byte, self.of_place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        places_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        return self.of_byte(bytes_BT) + self.of_place(places_T)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, inputs_BTC: torch.Tensor) -> torch.Tensor:
        mask_TT = nn.Transformer.generate_square_subsequent_mask(inputs_BTC.shape[1], device=inputs_BTC.device)
        return self.layer(inputs_BTC, src_mask=mask_TT, is_causal=True)  # type: ignore[no-any-return]


def loss_of(outputs_BTC: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs_BTC.flatten(0, 1), targets_BT.flatten())


def main() -> None:
    run = atoll.init(seed=1, strategy="groups")
    layers = [Embedding, *[Block] * LAYERS, lambda: nn.Linear(WIDTH, 256)]  # each worker makes its own alone
    train_round, loader = run.prepare_pipeline(
        layers,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss_of,
        Bytes(),
        batch_size=32,
        micro_batches=8,
        clip_norm=1.0,
        round_batches=8,
    )
    for _ in run.epochs(3):
        for each in loader:
            run.report(loss=train_round(each).item())


if __name__ == "__main__":
    main()
