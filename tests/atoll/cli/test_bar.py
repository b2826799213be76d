"""The bar of a followed job: on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from scripted_controller import ScriptedController

from atoll.v1 import jobs_pb2 as pb

JOB = "vit-3f9a"
COMMAND = (sys.executable, "-c", "from atoll.cli.main import main; main()")


@pytest.fixture
def trained(controller: ScriptedController) -> ScriptedController:
    """Two fifths of its epochs are over; it ends when somebody has watched."""
    progress = pb.Progress(step=12, epoch=1, samples_per_s=640, left_s=185, trained_share=0.4)
    controller.script.add(JOB, progress=progress)
    controller.script.write(b"hello\n")
    return controller


def on_a_terminal(controller: ScriptedController, until: str, *args: str) -> str:
    """What a terminal of 100 columns shows of the command; the job ends once it shows `until`."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "ATOLL_CONTROLLER": controller.address, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen((*COMMAND, *args), stdin=theirs, stdout=theirs, stderr=theirs, env=env) as running:
        os.close(theirs)
        seen = ""
        while data := _read(ours):
            seen += data
            if until in plain(seen):
                controller.script.change(JOB, phase=pb.PHASE_DONE)
        os.close(ours)
    assert running.returncode == 0, seen
    return seen


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # EIO: nobody holds its other end any more
        return ""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_terminal_shows_a_bar_with_the_time_that_is_left_below_the_output(trained: ScriptedController) -> None:
    shown = plain(on_a_terminal(trained, "about 3 min left", "logs", JOB, "--follow"))
    assert re.search("\u2501{10}.* 40% about 3 min left", shown), shown
    assert "[0] hello" in shown
    assert f"{JOB} running  step 12  epoch 1  640 samples/s" in shown


def test_a_pipe_gets_the_output_alone(trained: ScriptedController) -> None:
    trained.script.change(JOB, phase=pb.PHASE_DONE)
    env = {**os.environ, "ATOLL_CONTROLLER": trained.address}
    done = subprocess.run(
        (*COMMAND, "logs", JOB, "-f"), env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("[0] hello\n", "")


def test_a_job_that_does_not_say_how_long_it_is_has_no_bar(controller: ScriptedController) -> None:
    controller.script.add(JOB, progress=pb.Progress(step=12, epoch=1))
    controller.script.write(b"hello\n")
    shown = plain(on_a_terminal(controller, "step 12", "logs", JOB, "--follow"))
    assert "%" not in shown
