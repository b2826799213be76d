"""Trials of `atoll profile` in whole runs: what the environment forces on a script that knows nothing of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zmq_agent import Start, torchrun_like

from atoll.profiling.trials import StepLoss, whole_batches

STEPS, JUDGED, BATCH = 6, 4, 12  # of an epoch of 100 samples, at whose end everything is waited for
Lines = list[dict[str, Any]]


def trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: Start, *, world_size: int = 2, **asked: object
) -> list[Lines]:
    """By rank, what each wrote."""
    folder.mkdir()
    wanted = {
        "directory": str(folder), "steps": STEPS, "judged_steps": JUDGED, "batch": BATCH, "sparsity": None,
        "strategy": "stale-sparse", **asked,
    }  # fmt: skip
    monkeypatch.setenv("ATOLL_PROBE", json.dumps(wanted))
    assert torchrun_like("probed.py", str(folder), world_size=world_size, start=start) == [0] * world_size
    files = [folder / f"rank-{rank}.jsonl" for rank in range(world_size)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def losses(ranks: list[Lines], event: str) -> list[tuple[int, float]]:
    return whole_batches(
        [StepLoss(line["step"], line["local"], line["loss"]) for line in lines if line["event"] == event]
        for lines in ranks
    )


def weights(folder: Path, rank: int) -> list[str]:
    return (folder / f"weights-{rank}.jsonl").read_text().split()


@pytest.mark.parametrize("exchange", ["updates", "gradients"])
def test_a_compressed_trial_is_stale_exact_and_judges_what_all_share(
    exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    """1. The batch of the trial holds, for as many steps as were asked, and the script ends there. 2. No layer ran on
    newer weights than the last round but one, though all parts came at once. 3. The steps that are judged begin with
    the same weights, on all ranks. 4. So the same trial comes to the same losses again, whatever arrived when."""
    first, again = (
        trial(tmp_path / name, monkeypatch, start, sparsity=0.9, settings={"exchange": exchange, "values": "float16"})
        for name in ("first", "again")
    )
    for rank, lines in enumerate(first):
        assert [line["event"] for line in lines] == ["prepared", *["step"] * STEPS, *["judged"] * JUDGED, "end"]
        assert lines[-1]["statistics"]["fresh_share"] == 0.0
        assert lines[-1]["statistics"]["sparsity"] == 0.9
        assert len(weights(tmp_path / "first", rank)) == STEPS + JUDGED
    assert [count for count, _ in losses(first, "step")] == [12] * 6
    assert [count for count, _ in losses(first, "judged")] == [12, 12, 4, 12]
    judged = {digest for rank in range(2) for digest in weights(tmp_path / "first", rank)[STEPS:]}
    assert len(judged) == 1
    assert judged.isdisjoint(weights(tmp_path / "first", 0)[:STEPS])
    for event in ("step", "judged"):
        wanted = [loss for _, loss in losses(again, event)]
        assert [loss for _, loss in losses(first, event)] == pytest.approx(wanted, rel=1e-3)
    assert not list((tmp_path / "first").glob("went-on"))
    assert not (tmp_path / "first/checkpoints").exists()


def test_a_dense_trial_is_that_of_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    two = trial(tmp_path / "two", monkeypatch, start)
    one = trial(tmp_path / "one", monkeypatch, start, world_size=1)
    for event in ("step", "judged"):
        found, wanted = losses(two, event), losses(one, event)
        assert [count for count, _ in found] == [count for count, _ in wanted]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-4)
    assert losses(two, "judged")[0][1] < losses(two, "step")[0][1]


def test_looking_ends_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    looked = trial(tmp_path / "look", monkeypatch, start, steps=0)
    assert [[line["event"] for line in lines] for lines in looked] == [["prepared"], ["prepared"]]
    prepared = looked[0][0]
    assert (prepared["samples"], prepared["batch"], prepared["optimizer"]["kind"]) == (100, 50, "SGD")
    assert prepared["parameters"][0] == ["0.weight", [64, 8], "float32", True]
    assert looked[0] == looked[1]
