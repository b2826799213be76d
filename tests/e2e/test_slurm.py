"""deploy/slurm/atoll.sbatch in a real Slurm: one node, which is this machine, with daemons of the test's own."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from held_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
NODE = socket.gethostname().partition(".")[0]
DAEMONS = ("munged", "slurmctld", "slurmd")
WAIT_S = 240.0

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all(map(shutil.which, DAEMONS)), reason="no Slurm here (apt-get install slurmctld slurmd munge): NOT tested"
    ),
]


def wait_until(met: Callable[[], object], what: str) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < ends_s, what
        time.sleep(0.2)


class Slurm:
    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        atoll = folder / "bin/atoll"
        atoll.parent.mkdir()
        atoll.write_text(f'#!/bin/sh\nexec {sys.executable} -m atoll.cli.main "$@"\n')
        atoll.chmod(0o755)
        path = f"{atoll.parent}:{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "SLURM_CONF": f"{folder}/slurm.conf"}
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={NODE}(127.0.0.1)\nSlurmctldPort={free_port()}\nSlurmdPort={free_port()}\n"
            f"AuthInfo=socket={folder}/munge\nSlurmUser={getpass.getuser()}\nSlurmdUser={getpass.getuser()}\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
            f"MpiDefault=none\nFirstJobId={os.getpid() % 9000 + 1}\n"  # atoll.sbatch makes a port of it
            f"NodeName={NODE} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN\n"
            "PartitionName=all Nodes=ALL Default=YES State=UP\n"
        )
        for name in ("state", "spool"):
            (folder / name).mkdir()
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={folder}/munge", f"--key-file={folder}/key", *files)
        wait_until((folder / "munge").exists, "munged does not listen")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        wait_until(lambda: "idle" in self.run("sinfo", "-h"), "the node does not come")

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.out").open("wb") as log:
            self._processes.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def run(self, *command: str | Path) -> str:
        """What it prints; nothing where it fails, as a controller does that is not there yet."""
        done = subprocess.run(
            command, env=self.env, cwd=self._folder, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def close(self) -> None:
        self.run("scancel", f"--user={getpass.getuser()}")
        wait_until(lambda: not self.run("squeue", "-h"), "jobs do not end")
        for process in reversed(self._processes):
            process.terminate()
            process.wait(30)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    try:
        socket.gethostbyname(NODE)
    except OSError:
        pytest.skip(f"{NODE}, this machine's own name, has no address: NOT tested")
    made = Slurm(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_job_that_is_requeued_goes_on_and_ends_well(slurm: Slurm, tmp_path: Path) -> None:
    """1. The batch job has a cluster of its own, which trains. 2. Slurm kills all of it, and starts it again under the
    same id: the job goes on from its checkpoint. 3. The batch job ends with exit code 0 when the job is done."""
    script = ROOT / "tests/e2e/scripts/tiny.py"
    (tmp_path / "out").mkdir()
    arguments = ("--out", f"{tmp_path}/out", "--epochs", "12", "--step-s", "0.05")
    batch = slurm.run("sbatch", "--parsable", "--nodes=1", ROOT / "deploy/slurm/atoll.sbatch", script, *arguments)
    saved = lambda: list((tmp_path / f"atoll-{batch}").glob("jobs/*/**/step-*"))  # noqa: E731
    wait_until(saved, "no checkpoint")
    slurm.run("scontrol", "requeue", batch)
    wait_until(lambda: "JobState=PENDING" in slurm.run("scontrol", "show", "job", batch), "it is not requeued")
    slurm.run("scontrol", "update", f"JobId={batch}", "StartTime=now")  # it would wait two minutes
    (tmp_path / "out/full-speed").touch()
    over = re.compile(r"JobState=(COMPLETED|FAILED|CANCELLED|NODE_FAIL)")
    wait_until(lambda: over.search(slurm.run("scontrol", "show", "job", batch)), "it does not end")
    told = slurm.run("scontrol", "show", "job", batch)
    said = (tmp_path / f"slurm-{batch}.out").read_text()
    assert re.search(r"JobState=COMPLETED .*Restarts=1 .*ExitCode=0:0", told, re.DOTALL), said
    assert re.search(r"rank 0 resumes from step [1-9]", said), said
