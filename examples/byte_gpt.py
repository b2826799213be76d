"""A byte-level GPT of 1.9 M parameters on 8 MB of English prose. Also runs alone: python byte_gpt.py."""

from __future__ import annotations

import argparse

import torch
from data import Windows, text
from torch import nn
from torch.nn import functional

import atoll


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        grown: torch.Tensor = x + self.mlp(self.norm_2(x))
        return grown


class ByteGPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(positions))
        logits: torch.Tensor = self.norm(x) @ self.token.weight.T  # tied
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="sequences, of the whole job")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of text to train on")
    options = parser.parse_args()

    run = atoll.init(seed=1)
    stream = text()[: options.bytes]
    model = ByteGPT(width=192, layers=4, heads=6, context=options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    dataset = Windows(stream, options.context)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=options.batch_size)

    for epoch in run.epochs(options.epochs):
        for inputs, targets in loader:
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss=loss.item())
        if run.is_main:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
