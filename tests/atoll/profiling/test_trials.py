"""What a trial's workers are held to once they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import BadInput
from atoll.errors.exit_codes import PEER_LOST
from atoll.profiling import trials
from atoll.profiling.trials import Command, StepLoss, Trial, WorkerReport

COMMAND = Command(script=Path("train.py"), args=(), env={}, logs=Path("logs"))
TRIAL = Trial(workers=1, steps=10, judged_steps=2, batch=24)
STEPS = [StepLoss(step, 24, 1.0) for step in range(10)]


def test_one_that_did_what_was_asked_is_fine() -> None:
    trials.check(COMMAND, TRIAL, [WorkerReport(prepared={}, steps=STEPS, judged=STEPS[:2], ended=True)])
    trials.check(COMMAND, Trial(workers=1), [WorkerReport(prepared={})])


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (WorkerReport(), "train.py ended without run.prepare; only scripts that train through atoll.init"),
        (WorkerReport(prepared={}, ended=True), "train.py trained without run.backward"),
        (
            WorkerReport(prepared={}, steps=STEPS),
            r"after 10 of 12 steps \(batch 24, dense\). Let it train for",
        ),
    ],
)
def test_what_the_script_did_otherwise_is_said(told: WorkerReport, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        trials.check(COMMAND, TRIAL, [told])


@pytest.mark.parametrize(
    ("codes", "culprit"),
    [
        ({0: None, 1: PEER_LOST}, None),  # the lost worker still ends
        ({0: 1, 1: PEER_LOST}, 0),
        ({0: PEER_LOST, 1: None, 2: -9}, 2),
        ({0: 0, 1: PEER_LOST}, 1),
        ({0: 0, 1: None}, None),
    ],
)
def test_a_worker_that_lost_a_peer_is_not_to_blame(codes: dict[int, int | None], culprit: int | None) -> None:
    assert trials.culprit(codes) == culprit


def test_the_worker_that_failed_is_quoted_where_its_peer_ends_before_it(tmp_path: Path) -> None:
    """1. Worker 1 has lost worker 0, says so and ends. 2. Only then does worker 0 come to its error. 3. That is what
    the user is shown."""
    script, lost = tmp_path / "train.py", tmp_path / "lost"
    script.write_text(f"""
import os, pathlib, sys, time
lost = pathlib.Path({str(lost)!r})
if os.environ["RANK"] == "1":
    lost.touch()
    sys.exit({PEER_LOST})
while not lost.exists():
    time.sleep(0.01)
raise RuntimeError("the fault")
""")
    command = Command(script=script, args=(), env={}, logs=tmp_path)
    with pytest.raises(trials.ScriptFailed, match=r"ended with exit code 1 \(before training, worker 0\)") as raised:
        trials.run(command, Trial(workers=2), tmp_path, lambda steps: None)
    assert raised.value.last_lines[-1] == "RuntimeError: the fault"


def test_the_fingerprint_is_of_what_is_trained_not_of_its_batch() -> None:
    prepared = {"parameters": [["w", [2, 3], "float32", True]], "samples": 9, "batch": 4, "optimizer": {"kind": "SGD"}}
    first = trials.description_of(prepared)
    assert first["entries"] == 6
    assert trials.description_of(prepared | {"batch": 8}) == first
    assert trials.description_of(prepared | {"samples": 8}) != first


def test_the_last_lines_of_a_long_log_are_found(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n\n" for number in range(5000)))
    assert trials.last_lines(tmp_path / "log")[-2:] == ["line 4998", "line 4999"]
