"""Jobs that bring more than a script: modules of packages, what they import, and files written beside their code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import SCRIPTS, Cluster, wait_until
from made_wheels import make_wheel

from atoll.v1 import jobs_pb2 as pb

ATOLL = (sys.executable, "-m", "atoll.cli.main")
TRAIN = """
import sys
import tiny
from . import model
from shared.words import WORD
import atoll
run = atoll.init()
print("tiny", tiny.VERSION, model.NAME, WORD, sys.argv[1:], run.world_size)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package whose module trains, another beside it, a wheel that it imports, and a job file."""
    files = {
        "package/__init__.py": "",
        "package/train.py": TRAIN,
        "package/model.py": "NAME = 'net'",
        "shared/words.py": "WORD = 'found'",
        "requirements.txt": "# what it needs\n./wheels/tiny-1.5-py3-none-any.whl  # of the project\n",
        "job.toml": 'module = "package.train"\nworkdir = "."\nrequirements = "requirements.txt"\nworkers = 2\n'
        'env = { PIP_NO_INDEX = "1", UV_OFFLINE = "1" }\n',
    }
    folder = tmp_path / "project"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    make_wheel(folder / "wheels", "tiny", "1.5")
    return folder


def submitted(cluster: Cluster, folder: Path, *arguments: str) -> str:
    command = [*ATOLL, "--controller", cluster.addresses[0], "submit", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_module_with_packages_of_its_own(cluster: Cluster, project: Path) -> None:
    """1. The module runs as `python -m` runs it, imports a wheel that no node has, and what its workdir has. 2. Each
    node makes the environment once. 3. Another job with the same, submitted without a job file, makes none. 4. A
    package that is nowhere fails the job with the installer's last line, and all of it is in the log."""
    cluster.local([1.0, 1.0])
    first = submitted(cluster, project, "--config", "job.toml", "--name", "first", "--", "--lr", "0.1")
    assert cluster.wait_for_end(first).phase == pb.PHASE_DONE, cluster.story(first)
    said = "tiny 1.5 net found ['--lr', '0.1'] 2\n"
    wait_until("both have said it", lambda: cluster.log(first).count(said) == 2, 30)
    assert cluster.story(first).count("builds the job's own environment") == 2, "one for each node"

    arguments = ("-m", "package.train", "--workdir", ".", "--requirements", "requirements.txt", "--workers", "2")
    offline = ("--env", "PIP_NO_INDEX=1", "--env", "UV_OFFLINE=1")
    second = submitted(cluster, project, *arguments, *offline)
    assert second.startswith("train-")
    assert cluster.wait_for_end(second).phase == pb.PHASE_DONE, cluster.story(second)
    assert "makes" not in cluster.story(second)

    (project / "requirements.txt").write_text("nowhere-to-be-found==7\n")
    failing = submitted(cluster, project, *arguments, *offline, "--name", "failing")
    ended = cluster.wait_for_end(failing, 120)
    assert ended.phase == pb.PHASE_FAILED, cluster.story(failing)
    assert "the job's environment could not be made" in ended.reason
    assert "nowhere-to-be-found" in ended.reason
    wait_until("the installer's words", lambda: "nowhere-to-be-found" in cluster.log(failing), 30)


def test_writing_beside_the_code_is_warned_of(cluster: Cluster, tmp_path: Path) -> None:
    """1. Of a job that goes on, within seconds, once. 2. Of one that ends before anybody looked. 3. Not of one that
    writes elsewhere."""
    cluster.local([1.0])
    go = tmp_path / "go"
    job = cluster.submit("writes_beside.py", str(go), name="long")
    wait_until("a warning", lambda: "wrote outputs/model.pt beside its code" in cluster.story(job), 90)
    go.touch()
    assert cluster.wait_for_end(job).phase == pb.PHASE_DONE
    assert cluster.story(job).count("beside its code") == 1
    short = cluster.submit("writes_beside.py", str(go), name="short")
    assert cluster.wait_for_end(short).phase == pb.PHASE_DONE
    wait_until("a warning", lambda: "beside its code" in cluster.story(short), 30)
    quiet = cluster.submit("bad.py", "sleep", "0", name="quiet")
    assert cluster.wait_for_end(quiet).phase == pb.PHASE_DONE
    assert "beside its code" not in cluster.story(quiet)
    assert not (SCRIPTS / "outputs").exists()
