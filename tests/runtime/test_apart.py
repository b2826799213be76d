"""Two workers whose data or passes differ: each way has its own cause and next step. And lengths that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zmq_agent import Start, torchrun_like


def found_by(folder: Path, name: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


@pytest.mark.parametrize(
    ("case", "strategy", "said"),
    [
        ("stream", "dense", "The stream is not as long on every rank"),
        ("skip", "dense", "skipped a batch that others trained, before step 3"),
        ("unreached", "local-steps", "rank 1 called optimizer.step() for a batch of which no backward pass reached"),
        ("length", "dense", "the dataset has 20 samples on one rank and 28 on another rank in epoch 1"),
    ],
)
def test_ranks_apart_end_at_once_and_say_why(case: str, strategy: str, said: str, tmp_path: Path, start: Start) -> None:
    """All were "ranks are out of step"; a stream that ended earlier on one rank kept the other waiting for minutes."""
    codes = torchrun_like("apart.py", case, strategy, str(tmp_path), "-1", start=start, deadline_s=60)
    texts = found_by(tmp_path, f"{case}--1")
    assert texts, "no rank named the cause"
    assert all(said in text for text in texts)
    assert set(codes) <= {3, 75}  # a rank that met the other's end before its cause has lost a peer


def test_a_dataset_that_changes_its_length_is_trained_whole_in_each_epoch(tmp_path: Path, start: Start) -> None:
    """1. 8, 14 and 5 samples in three epochs. 2. Both ranks leave in the second one, where the dataset was longer than
    at the start. 3. The next run goes on there. Each sample counts once in its epoch."""
    assert torchrun_like("apart.py", "grow", "dense", str(tmp_path), "4", start=start) == [3, 3]
    assert torchrun_like("apart.py", "grow", "dense", str(tmp_path), "-1", start=start) == [0, 0]
    first, second = ([batch for rank in found_by(tmp_path, f"grow-{leave}") for batch in rank] for leave in ("4", "-1"))
    resumed_at = min(step for step, *_ in second)
    assert 2 < resumed_at <= 4, "in epoch 1"
    for epoch, samples in enumerate((8, 14, 5)):
        batches = [batch for batch in first if batch[0] < resumed_at] + second
        rows = [row for _, at, *rows in batches for row in rows if at == epoch]
        assert sorted(rows) == list(range(samples))
