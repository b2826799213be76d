"""The next word from hashed 1-, 2- and 3-grams before it: 24 M parameters in one table, of which a step touches 0.2 %.

    atoll submit examples/words.py --workers 2 --strategy zen

Its gradients are sparse, and strategy zen sends the rows that a step touches and no others. Runs alone too: python
words.py."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import Final

import numpy as np
import torch
from data import text
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import atoll

NGRAMS: Final = ((1,), (2,), (3,), (1, 2), (2, 3), (1, 2, 3))  # which of the words before, hashed together


class NextWord(nn.Sequential):
    """Logits of `words` words from the rows of a bag's n-grams."""

    def __init__(self, rows: int, width: int, words: int, *, sparse: bool = True) -> None:
        table = nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse)
        nn.init.normal_(table.weight, std=0.1)
        super().__init__(table, nn.Linear(width, words))


def next_words(stream: torch.Tensor, rows: int, words: int) -> TensorDataset:
    """int32 [n, grams] rows of the table, int64 [n] the word that follows by its rank; the last for all that are rarer.

    stream: uint8, prose."""
    spoken = re.findall(rb"[a-z']+", stream.numpy().tobytes().lower())
    rank = {word: number for number, (word, _) in enumerate(Counter(spoken).most_common())}
    ids = np.fromiter((rank[word] for word in spoken), np.uint64, len(spoken))
    before = {back: ids[3 - back : -back] for back in (1, 2, 3)}
    grams = np.empty((len(ids) - 3, len(NGRAMS)), np.int32)
    for column, gram in enumerate(NGRAMS):
        mixed = np.full(len(grams), column + 1, np.uint64)
        for back in gram:
            mixed = (mixed ^ before[back]) * np.uint64(0x9E3779B97F4A7C15)  # wraps: a multiplicative hash
        grams[:, column] = (mixed >> np.uint64(32)) % np.uint64(rows)
    return TensorDataset(torch.from_numpy(grams), torch.from_numpy(np.minimum(ids[3:], words - 1).astype(np.int64)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=512, help="words, of the whole job")
    parser.add_argument("--rows", type=int, default=500_000, help="of the table")
    parser.add_argument("--words", type=int, default=2048, help="that are told apart")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of text to train on")
    options = parser.parse_args()

    run = atoll.init(seed=1, strategy="zen")  # of a run without a controller; a job says it itself
    model = NextWord(options.rows, 48, options.words)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)  # takes sparse gradients, as SparseAdam and SGD do
    dataset = next_words(text()[: options.bytes], options.rows, options.words)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=options.batch_size)

    for epoch in run.epochs(options.epochs):
        for grams, words in loader:
            loss = functional.cross_entropy(model(grams), words)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss=loss.item())
        if run.is_main:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
