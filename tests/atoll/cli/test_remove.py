"""atoll rm: what it says, asks and refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import Any

import pytest
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.v1 import jobs_pb2 as pb

JOB = "vit-3f9a"


@pytest.fixture
def over(controller: ScriptedController) -> ScriptedController:
    """With a job that is over and has two checkpoints on disk and one in a store."""
    controller.script.add(JOB, pb.PHASE_DONE, ended_unix_s=1.7e9)
    rows = [
        pb.StoredCheckpoint(tier="disk", step=step, bytes=3 << 20, path=f"/mnt/{JOB}/step-{step}", nodes=["a", "b"])
        for step in (40, 20)
    ]
    rows.append(pb.StoredCheckpoint(tier="store", step=40, bytes=3 << 20, path=f"s3://bucket/{JOB}/step-40"))
    controller.script.checkpoints[JOB] = pb.CheckpointsReply(job=JOB, checkpoints=rows, notes=["node c is gone"])
    return controller


def rm(controller: ScriptedController, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["--controller", controller.address, "rm", *arguments])


def typed(controller: ScriptedController, word: str, *arguments: str) -> tuple[int, str]:
    """With somebody at a terminal who types this word. Returns exit code and what they saw."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{word}\n".encode())
        command = [sys.executable, "-m", "atoll.cli.main", "--controller", controller.address, "rm", *arguments]
        done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stdout + done.stderr


def test_it_says_what_there_is_and_asks(over: ScriptedController) -> None:
    code, seen = typed(over, "n", JOB)
    assert code == 1
    for words in (
        f"{JOB}: done",
        "its logs and events",
        f"2 checkpoints in /mnt/{JOB} on a, b: 6.0 MiB, steps 40, 20",
        f"1 checkpoints in s3://bucket/{JOB}: 3.0 MiB, steps 40",
        "node c is gone",
        f"Remove {JOB} for good?",
        "nothing was removed",
    ):
        assert words in seen
    assert JOB in over.script.jobs
    code, seen = typed(over, "y", JOB, "--keep-checkpoints")
    assert (code, "not its checkpoints on disk" in seen, f"{JOB} removed" in seen) == (0, True, True)
    assert over.script.jobs == {}


def test_with_yes_it_does_not_ask_and_with_nobody_to_ask_it_needs_that(over: ScriptedController) -> None:
    refused = rm(over, JOB)
    assert refused.exit_code == 2
    assert "Confirm with --yes" in refused.output
    assert JOB in over.script.jobs
    done = rm(over, JOB, "--yes", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"job": JOB, "notes": []})
    assert over.script.jobs == {}


def test_a_job_that_lives_is_refused_with_the_next_step(controller: ScriptedController) -> None:
    controller.script.add(JOB)
    refused = rm(controller, JOB, "--yes")
    assert refused.exit_code == 1
    assert f"`atoll cancel {JOB}` ends it" in refused.output
    assert "Remove" not in controller.script.calls
    assert rm(controller, "no-such-job", "--yes").exit_code == 2
