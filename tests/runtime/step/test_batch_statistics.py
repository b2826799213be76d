"""Models with BatchNorm layers train whatever the split of a batch is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from zmq_agent import Start, torchrun_like

from atoll.agent.runtime.step.backward.batch_statistics import batch_statistics_layers, name_drop_last
from atoll.errors import BadInput


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    return model


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm2d(2)), 2),
        (nn.Sequential(nn.BatchNorm3d(2)).eval(), 1),  # the script will call train()
        (frozen(), 0),
        (nn.Sequential(nn.SyncBatchNorm(2), nn.InstanceNorm1d(2), nn.GroupNorm(1, 2), nn.LayerNorm(2)), 0),
    ],
    ids=["training", "not yet training", "frozen", "others"],
)
def test_layers_that_compute_with_the_local_batch_are_known(model: nn.Module, layers: int) -> None:
    assert len(batch_statistics_layers(model)) == layers


def test_two_ranks_train_through_a_last_batch_of_three(tmp_path: Path, start: Start) -> None:
    """1. 11 samples in batches of 4 over two ranks leave 3: 2 for rank 0 and 1 for rank 1. 2. BatchNorm1d raised there.
    3. Now rank 0 trains all three, and rank 1 two of them at weight 0."""
    assert torchrun_like("batch_norm.py", str(tmp_path), "11", start=start) == [0, 0]
    assert (tmp_path / "rank-0").read_text().split() == ["2:2", "2:2", "3:3"]
    assert (tmp_path / "rank-1").read_text().split() == ["2:2", "2:2", "2:0"]


def test_a_batch_of_one_sample_in_all_names_the_way_out(tmp_path: Path, start: Start) -> None:
    """1. 9 samples in batches of 4 leave one. 2. torch said "more than 1 value per channel". 3. Now both ranks hear of
    drop_last."""
    assert torchrun_like("batch_norm.py", str(tmp_path), "9", start=start) == [2, 2]
    for rank in range(2):
        assert "Use drop_last=True" in (tmp_path / f"rank-{rank}").read_text()


def test_one_image_and_evaluation_are_no_error() -> None:
    """One sample with several values per channel trains as ever; so does whatever is in eval mode."""
    images, rows = nn.BatchNorm2d(3), nn.BatchNorm1d(3)
    hooks = name_drop_last([images, rows])
    images(torch.randn(1, 3, 4, 4))
    rows(torch.randn(1, 3, 5))
    with pytest.raises(BadInput, match="drop_last"):
        rows(torch.randn(1, 3))
    rows.eval()(torch.randn(1, 3))
    for hook in hooks:
        hook.remove()
    with pytest.raises(ValueError, match="more than 1 value"):
        rows.train()(torch.randn(1, 3))
