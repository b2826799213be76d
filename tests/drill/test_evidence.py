from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atoll.errors import BadInput
from drill.evidence import Incarnation, parse, read
from drill.recording import FULL_SPEED, Recorder
from drill.stories import begun, evidence, trained


def test_what_a_recorder_writes_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_RUN", "3")
    model = torch.nn.Linear(2, 1)
    out = tmp_path / "out"
    with Recorder(out, 1, model) as recorder:
        recorder.step(7, 0, [4, 5])
        with torch.no_grad():
            model.weight.add_(1)
        recorder.step(8, 1, [])
        assert recorder.paced
        (out / FULL_SPEED).touch()
        assert not recorder.paced
        recorder.finished(9)
    found = read(out)
    assert [(one.run, one.rank, one.step, one.epoch, one.samples) for one in found.begun] == [
        (Incarnation(3), 1, 7, 0, (4, 5)),
        (Incarnation(3), 1, 8, 1, ()),
    ]
    before, after = (one.weights for one in found.begun)
    assert before != after
    assert found.final == {1: after}


def test_a_line_that_is_being_written_does_not_count_yet() -> None:
    line = json.dumps({"step": 1, "epoch": 0, "ids": [2], "weights": "w", "at": 1.0})
    assert [one.step for one in parse(1, 0, f"{line}\n{line[:20]}")] == [1]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"step": 1, "epoch": 0, "ids": 5, "weights": "w", "at": 1}'])
def test_a_line_that_no_recorder_wrote_is_refused_with_its_place(line: str) -> None:
    with pytest.raises(BadInput, match="line 1 of run 2, rank 5"):
        list(parse(2, 5, line + "\n"))


def test_no_folder_is_no_evidence(tmp_path: Path) -> None:
    assert read(tmp_path / "none").begun == ()


def test_the_newest_run_of_a_step_counts() -> None:
    found = evidence(trained(1, range(4)), trained(2, range(3, 6)))
    assert {one.run for one in found.that_counts(2).values()} == {Incarnation(1)}
    assert {one.run for one in found.that_counts(3).values()} == {Incarnation(2)}
    assert found.spans == {Incarnation(1): (0, 3), Incarnation(2): (3, 5)}


def test_a_step_of_a_later_view_is_told_from_the_same_in_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A run goes on in place: its processes begin a step again in view 2, where ranks have moved up. 2. The evidence
    has both, each of its view and of the rank there."""
    model = torch.nn.Linear(2, 1)
    monkeypatch.setenv("ATOLL_RUN", "1")
    monkeypatch.setenv("ATOLL_RANK", "2")
    with Recorder(tmp_path, 2, model) as recorder:
        recorder.step(4, 0, [1])
        monkeypatch.setenv("ATOLL_VIEW", "2")
        monkeypatch.setenv("RANK", "1")
        recorder.step(4, 0, [2])
        recorder.finished(5)
    found = read(tmp_path)
    assert [(one.run, one.rank, one.samples) for one in found.begun] == [((1, 1), 2, (1,)), ((1, 2), 1, (2,))]
    assert [*found.final] == [1]


def test_an_epochs_last_batch_shown_again_is_told_from_a_step_done_again() -> None:
    """Step 2 ends an epoch. Shown again it begins with what it led to; done again, with what it began from before."""
    shown = [begun(2, rank, 2, weights="w3") for rank in (0, 1)]
    assert evidence(trained(1, range(3)), shown, trained(2, range(3, 6))).shown_again == {(Incarnation(2), 2)}
    assert evidence(trained(1, range(3)), trained(2, range(2, 6))).shown_again == frozenset()


def test_the_jobs_very_last_batch_may_be_shown_again_too() -> None:
    shown = [begun(2, rank, 5, weights="w6") for rank in (0, 1)]
    assert evidence(trained(1, range(6)), shown).shown_again == {(Incarnation(2), 5)}
