"""The way a new user goes: up, submit, follow, look, and end it; with the real command in real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cluster import SCRIPTS, Cluster, alive, wait_until
from held_ports import free_port
from shared_processes import PIDS
from warm import COMMAND_LINE

from atoll.client.client import Client
from atoll.v1 import jobs_pb2 as pb

ATOLL = (sys.executable, "-m", "atoll.cli.main")


class Up:
    """`atoll up` with two agents, started as by `atoll up &` in a script: with SIGINT ignored."""

    def __init__(self, data: Path) -> None:
        self.data, self.address = data, f"127.0.0.1:{free_port()}"
        ignored = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
        options = ("--agents", "2", "--listen", self.address, "--data-dir", str(data))
        self.process = subprocess.Popen([*ignored, *ATOLL, "up", *options], stdout=subprocess.PIPE, text=True)
        PIDS.add(self.process.pid)

    def close(self) -> None:
        """Ctrl-C, where it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        PIDS.discard(self.process.pid)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def ups() -> Iterator[list[Up]]:
    """All that were started."""
    started: list[Up] = []
    yield started
    for one in started:
        one.close()


@pytest.fixture
def up(ups: list[Up], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Up:
    """One that other tests use too. Its address is in ATOLL_CONTROLLER. Each test has names of its own for its jobs,
    and cancels those that run."""
    if not ups or ups[-1].process.poll() is not None:
        ups.append(Up(tmp_path_factory.mktemp("up")))
        stdout = ups[-1].process.stdout
        assert stdout is not None
        ready = stdout.readline()
        assert ready.startswith("ready"), ready
    monkeypatch.setenv("ATOLL_CONTROLLER", ups[-1].address)
    return ups[-1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ATOLL, *arguments], capture_output=True, text=True, timeout=150, check=False)


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no process and waits for none in a fork of what has imported its modules: a new
    interpreter takes half a second for that. Commands of the former kind are run as a user does."""
    assert Cluster.stock is not None
    return Cluster.stock.run(COMMAND_LINE, *arguments, timeout_s=150)


def wait_for_job(name: str, what: str, condition: Callable[[pb.Job], bool]) -> pb.Job:
    """Poll by the client: a command takes half a second of a processor."""
    with Client() as client:

        def found() -> pb.Job | None:
            jobs = [one for one in client.jobs(ended=True) if one.spec.name == name]
            return jobs[0] if jobs and condition(jobs[0]) else None

        job = wait_until(what, found, 120)
    assert job is not None
    return job


def phase(name: str) -> str:
    return str(json.loads(ask("status", name, "--json").stdout)["phase"])


def test_follow_a_job_to_its_good_and_its_bad_end(up: Up, tmp_path: Path) -> None:
    tiny, bad = str(SCRIPTS / "tiny.py"), str(SCRIPTS / "bad.py")
    good = run("submit", tiny, "--name", "good", "--workers", "2", "--follow", "--", f"--out={tmp_path / 'out'}")
    assert good.returncode == 0, good.stderr
    shown = run("status", "good", "--json")
    status = json.loads(shown.stdout)
    assert status["phase"] == "done"
    assert len(status["workers"]) == 2
    failed = run("submit", bad, "--name", "bad", "--max-restarts", "0", "--follow", "--", "raise")
    assert failed.returncode == 1
    assert "does not like its input" in failed.stderr
    assert "Traceback" not in failed.stderr.splitlines()[-1]
    for job, code in (("good", None), ("bad", 2)):
        told = json.loads(ask("trace", job, "--json").stdout)["resourceSpans"][0]["scopeSpans"][0]["spans"]
        assert {"queued", "run 1", "starting", "running"} < {span["name"] for span in told}
        assert told[0]["status"].get("code") == code, told[0]
    names = {job["id"].rsplit("-", 1)[0] for job in json.loads(ask("jobs", "--all", "--json").stdout)["jobs"]}
    assert names >= {"good", "bad"}
    assert len(json.loads(ask("nodes", "--json").stdout)["nodes"]) == 2
    assert ask("status", "no-such-job").returncode == 2


def test_a_removed_job_leaves_nothing_behind(up: Up, tmp_path: Path) -> None:
    """1. Two jobs are done. 2. One is removed: its checkpoints, logs and records are gone, the other's are there. 3. An
    event says so. 4. One that lives is not removed."""
    jobs = []
    for name in ("first", "second"):
        out = f"--out={tmp_path / name}"
        arguments = ("--step-s=0", "--epochs=1", out)
        done = run("submit", str(SCRIPTS / "tiny.py"), "--name", name, "-f", "--", *arguments)
        assert done.returncode == 0, done.stderr
        jobs.append(json.loads(ask("status", name, "--json").stdout)["id"])
    first, second = jobs

    def places(job: str) -> list[Path]:
        return [path for path in up.data.rglob(job) if path.is_dir() and "etcd" not in path.parts]

    assert {path.parent.name for path in places(first)} >= {"jobs", "logs"}
    removed = ask("rm", "first", "--yes")
    assert (removed.returncode, removed.stdout) == (0, f"{first} removed\n"), removed.stderr
    assert places(first) == []
    assert {path.parent.name for path in places(second)} >= {"jobs", "logs"}
    there = {job["id"] for job in json.loads(ask("jobs", "--all", "--json").stdout)["jobs"]}
    assert {first, second} & there == {second}
    assert ask("status", first).returncode == 2
    assert f"job {first}, done, was removed" in ask("events").stdout
    assert ask("submit", str(SCRIPTS / "bad.py"), "--name", "stays", "--", "sleep", "300").returncode == 0
    refused = ask("rm", "stays", "--yes")
    assert refused.returncode == 1
    assert "`atoll cancel" in refused.stderr
    assert ask("cancel", "stays").returncode == 0


def test_ctrl_c_detaches_and_the_job_lives(up: Up) -> None:
    command = [*ATOLL, "submit", str(SCRIPTS / "bad.py"), "--name", "long", "--follow", "--", "sleep", "300"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_job("long", "the job runs", lambda job: job.phase == pb.PHASE_RUNNING)
    assert following.stderr is not None
    assert following.stderr.readline() != ""  # it follows by now: it is not only about to
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=60)
    assert following.returncode == 130
    assert "goes on" in said
    assert phase("long") == "running"
    assert ask("cancel", "long").returncode == 0
    wait_for_job("long", "it is cancelled", lambda job: job.phase == pb.PHASE_CANCELLED)


def test_up_in_the_background_and_a_job_that_is_resumed(tmp_path: Path) -> None:
    """1. `up --detach` comes back when all is ready, and goes on. 2. The same again says that it runs already, another
    one is refused; the shell completes the ids of jobs. 3. A job that is cancelled goes on as another one, from its
    last checkpoint; one that is done does not. 4. `top` shows it in a pipe. 5. `down` ends all of it, and again it has
    nothing to do. 6. An `up` that cannot listen says why at once."""
    address, data, out = f"127.0.0.1:{free_port()}", tmp_path / "data", tmp_path / "out"
    where = ("--listen", address, "--data-dir", str(data))
    started = run("up", "--agents", "1", "--detach", *where)
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("ready: 1 agent"), started.stdout
    assert f"atoll down --data-dir {data}" in started.stderr
    ours = [p for p in psutil.process_iter(["cmdline"]) if str(data) in " ".join(p.info["cmdline"] or ())]
    os.environ["ATOLL_CONTROLLER"] = address
    try:
        again = run("up", "--detach", *where)
        assert (again.returncode, again.stdout) == (0, f"runs already: 1 agent, controller {address}\n"), again.stderr
        for other in (("--agents", "2", *where), ("--listen", f"127.0.0.1:{free_port()}", "--data-dir", str(data))):
            refused = run("up", "--detach", *other)
            assert (refused.returncode, f"with 1 agent at {address}. `atoll down" in refused.stderr) == (1, True), (
                refused
            )
        arguments = ("--step-s=0.1", "--epochs=40", f"--out={out}")
        submitted = run(
            "submit", str(SCRIPTS / "tiny.py"), "--checkpoint-every", "5", "--name", "tiny", "--", *arguments
        )
        job = submitted.stdout.strip()
        words = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll status tin", "COMP_CWORD": "2"}
        completed = subprocess.run(
            [*ATOLL], capture_output=True, text=True, timeout=60, env=os.environ | words, check=False
        )
        assert completed.stdout.split() == [job], completed.stderr

        wait_for_job("tiny", "a checkpoint", lambda seen: seen.checkpoint_step >= 10)
        refused = ask("resume", job)
        assert (refused.returncode, "only what was cancelled or failed" in refused.stderr) == (1, True), refused.stderr
        assert ask("cancel", job).returncode == 0
        kept = wait_for_job("tiny", "it is cancelled", lambda job: job.phase == pb.PHASE_CANCELLED).checkpoint_step
        (out / "full-speed").touch()
        resumed = run("resume", job, "--follow")
        assert resumed.returncode == 0, resumed.stderr
        assert f"from step {kept} of {job}" in resumed.stderr
        assert resumed.stdout.strip() != job
        assert ask("resume", resumed.stdout.strip()).returncode == 1
        shown = ask("top")
        assert job in shown.stdout
        assert "1 of 1 nodes connected" in shown.stdout
        stopped = run("down", "--data-dir", str(data))
        assert (stopped.returncode, stopped.stdout) == (0, "stopped\n"), stopped.stderr
        gone, left = psutil.wait_procs(ours, timeout=30)
        assert (len(gone) >= 4, left) == (True, [])
    finally:
        del os.environ["ATOLL_CONTROLLER"]
        assert run("down", "--data-dir", str(data)).returncode == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        failed = run("up", "--detach", "--listen", busy, "--data-dir", str(data))
        assert (failed.returncode, "Address already in use" in failed.stderr) == (2, True)


NVML = """
from types import SimpleNamespace

class NVMLError(Exception): ...

def unsupported(*arguments): raise NVMLError("not supported")

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda ordinal: ordinal
nvmlDeviceGetUUID = lambda handle: "GPU-77aa"
nvmlDeviceGetName = lambda handle: "RTX 3090"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=24 << 30, used=3 << 30)
nvmlDeviceGetUtilizationRates = nvmlDeviceGetTemperature = nvmlDeviceGetMigMode = nvmlDeviceGetPciInfo = unsupported
NVML_TEMPERATURE_GPU = 0
"""


def test_agents_share_the_only_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Two agents on a machine with one GPU (NVML is made up) each announce half of it. 2. An agent that wants it for
    itself is refused, in one line."""
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    data, address = tmp_path / "up", f"127.0.0.1:{free_port()}"
    up = run("up", "--agents", "2", "--share-gpu", "--listen", address, "--data-dir", str(data), "--detach")
    try:
        assert up.returncode == 0, up.stderr
        monkeypatch.setenv("ATOLL_CONTROLLER", address)
        nodes = json.loads(run("nodes", "--json").stdout)["nodes"]
        (refused,) = run("agent", "--name", "x", "--state-dir", str(tmp_path / "x")).stderr.splitlines()[-1:]
    finally:
        run("down", "--data-dir", str(data))
    devices = [device for node in nodes for device in node["devices"]]
    parts = [(one["kind"], one["uuid"], one["sharers"], one["memory_bytes"]) for one in devices]
    assert parts == [("cuda", "GPU-77aa", 2, 12 << 30)] * 2
    assert "which shares it as one of 2 agents. Give this agent --share-gpu 2, or leave it its own GPUs" in refused


def test_nothing_outlives_up(up: Up) -> None:
    """`up` itself is killed, not asked to stop."""
    assert ask("submit", str(SCRIPTS / "bad.py"), "--name", "lives", "--", "sleep", "300").returncode == 0
    wait_for_job("lives", "the worker runs", lambda job: job.phase == pb.PHASE_RUNNING)
    started = [process.pid for process in psutil.Process(up.process.pid).children(recursive=True)]
    assert len(started) >= 5  # controller, etcd, two agents, a worker
    up.process.kill()
    wait_until("all of them are gone", lambda: not any(alive(pid) for pid in started), 30)


def test_no_controller_is_exit_code_three() -> None:
    refused = ask("--controller", "127.0.0.1:1", "--timeout", "1", "jobs")
    assert refused.returncode == 3
    assert len(refused.stderr.strip().splitlines()) == 1
