"""The race's examples are cut and drawn as it says: on a few of them, without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from racing.examples import Rows, Windows
from racing.task import Batches, everything, loss_of, shards
from torch import nn

TEXT = np.arange(100, dtype=np.uint8)


def rows(first: int, count: int) -> Rows:
    numbers = torch.arange(first, first + count)
    return Rows(numbers[:, None].float(), numbers)


@dataclass(frozen=True, slots=True)
class Two:
    """Two domains: the numbers from 0 to 79, and from 100 to 179."""

    batch: int = 16
    rate: float = 1.0

    def model(self) -> nn.Module:
        return nn.Linear(1, 200)

    def domains(self) -> Sequence[tuple[Rows, Rows]]:
        return [(rows(first, 80), rows(first + 80, 4)) for first in (0, 100)]


def test_a_window_is_its_bytes_and_those_that_follow() -> None:
    inputs, targets = Windows(TEXT, 4).at([0, 95])
    assert inputs.tolist() == [[0, 1, 2, 3], [95, 96, 97, 98]]
    assert targets.tolist() == [[1, 2, 3, 4], [96, 97, 98, 99]]


@pytest.mark.parametrize("examples", [Windows(TEXT, 4), rows(0, 50)])
def test_examples_to_judge_by_reach_from_end_to_end(examples: Windows | Rows) -> None:
    inputs, _ = examples.spaced()
    assert inputs[0].flatten()[0] == 0
    assert inputs[-1].flatten()[0] == (95 if isinstance(examples, Windows) else 49)
    assert len(examples.between(10, 20)) <= 10


@pytest.mark.parametrize("partition", ["P0", "P2", "P3"])
def test_no_example_is_on_two_islands(partition: str) -> None:
    held = [part.at(range(len(part)))[1] for shard in shards(Two(), partition, 4, seed=1) for part in shard.parts]
    assert sorted(torch.cat(held).tolist()) == [*range(80), *range(100, 180)]


def test_unequal_islands_hold_and_train_unequally() -> None:
    unequal = shards(Two(), "P3", 4, seed=1)
    assert [sum(map(len, shard.parts)) for shard in unequal] == pytest.approx(
        [160 * k / 15 for k in (8, 4, 2, 1)], abs=2
    )
    assert [shard.speed for shard in unequal] == [1.0, 0.5, 0.25, 0.25]
    assert [shard.speed / shard.batches for shard in unequal] == [0.5] * 4  # so all steps take as long
    assert [len(Batches(shard, Two(), 1, i).at(0)[1]) for i, shard in enumerate(unequal)] == [32, 16, 8, 8]


def test_an_island_has_a_domain_of_its_own_and_a_batch_by_seed_island_and_step() -> None:
    first, second, third, _ = shards(Two(), "P1", 4, seed=1)
    assert first.parts == third.parts
    batches = Batches(second, Two(), seed=1, island=1)
    inputs, targets = batches.at(5)
    assert ((targets >= 100) & (targets < 180)).all()
    assert torch.equal(inputs[:, 0].long(), targets)
    assert torch.equal(batches.at(5)[1], targets)
    assert not torch.equal(batches.at(6)[1], targets)
    both = Batches(everything(Two()), Two(), seed=1, island=0).at(0)[1]
    assert (both < 80).any()
    assert (both >= 100).any()


def test_losses_are_means_over_targets_whatever_their_shape() -> None:
    logits = torch.zeros(2, 3, 7)
    assert loss_of(logits, torch.zeros(2, 3, dtype=torch.long)).item() == pytest.approx(np.log(7))
    assert loss_of(logits[:, 0], torch.zeros(2, dtype=torch.long)).item() == pytest.approx(np.log(7))
