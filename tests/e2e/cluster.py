"""A whole cluster of real processes for one test: etcd, controllers, agents; everything killable by pid."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import psutil
from held_ports import free_port
from warm import WarmStock, WarmWorker

from atoll.agent.supervisor.memory import root_of
from atoll.cli.render import wire
from atoll.client.client import Client
from atoll.jobs.code_bundle import pack
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

SCRIPTS = Path(__file__).parent / "scripts"
ATOLL = (sys.executable, "-m", "atoll.cli.main")
FORKED = str(Path(__file__).parent / "forked_daemon.py")
T = TypeVar("T")
ENDED = (pb.PHASE_DONE, pb.PHASE_FAILED, pb.PHASE_CANCELLED)


def wait_until(what: str, condition: Callable[[], T], deadline_s: float) -> T:
    """Poll until the condition is truthy. The failure says what was waited for."""
    ends = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > ends:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.1)


class Cluster:
    """Controllers, agents and (where a test needs to kill it apart) etcd, each a process of its own.

    Used with `with`; at the end everything it started is gone, also after a failure, and the logs are printed.
    """

    stock: ClassVar[WarmStock | None] = None
    """Which controllers and agents are forked from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes] | WarmWorker] = {}
        self.commands: dict[str, Sequence[str]] = {}
        self.addresses: list[str] = []
        self._client: Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_client()
        order = sorted(self.processes, key=lambda name: (name.startswith("etcd"), name.startswith("controller")))
        for name in order:
            self._stop(self.processes[name])
            shutil.rmtree(root_of(self.folder / name), ignore_errors=True)  # killed agents leave theirs
        if kind is not None:
            self.print_logs()

    def print_logs(self) -> None:
        for path in sorted(self.folder.glob("*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")

    def close_client(self) -> None:
        """The next one knows all controllers that there are by then."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _stop(self, process: subprocess.Popen[bytes] | WarmWorker) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
                raise AssertionError(f"process {process.pid} did not stop within 60 s of SIGTERM") from None

    # Starting and killing.

    def start(self, name: str, command: Sequence[str]) -> None:
        self.commands[name] = command
        with (self.folder / f"{name}.log").open("ab") as log:
            if self.stock is not None and (*command[: len(ATOLL)],) == ATOLL:
                self.processes[name] = self.stock.start(("", FORKED, *command[len(ATOLL) :]), os.environ, log)
            else:
                self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def restart(self, name: str) -> None:
        self.start(name, self.commands[name])

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(30)

    def atoll(self, name: str, *arguments: str) -> None:
        self.start(name, (*ATOLL, *arguments))

    def etcd(self) -> str:
        """A separate etcd; its client address."""
        from atoll.controller.state.etcd_binary import find_etcd

        client, peer = free_port(), free_port()
        url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self.start(
            "etcd",
            (
                str(find_etcd().path), "--name=e", f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}", f"--listen-peer-urls={peer_url}", "--log-level=error",
                f"--initial-advertise-peer-urls={peer_url}", f"--initial-cluster=e={peer_url}",
            ),
        )  # fmt: skip
        return f"127.0.0.1:{client}"

    def controller(self, name: str = "controller", *, etcd: str | None = None) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.addresses.append(address)
        extra = ("--etcd", etcd) if etcd else ()
        self.atoll(name, "controller", "--listen", address, "--data-dir", str(self.folder / name), *extra)

    def agent(self, name: str, speed: float = 1.0, *more: str) -> None:
        self.atoll(
            name, "agent", "--controller", ",".join(self.addresses), "--name", name, "--speed", str(speed),
            "--state-dir", str(self.folder / name), "--jobs-dir", str(self.folder / "jobs"), "--threads", "1",
            *more,
        )  # fmt: skip

    def led_by_one_of_two(self) -> None:
        """Controllers a, which leads, and b on one etcd, and two agents."""
        etcd = self.etcd()
        self.controller("controller-a", etcd=etcd)
        wait_until("a leader", lambda: self.client.nodes().controller, 60)
        self.controller("controller-b", etcd=etcd)
        for name in ("agent-0", "agent-1"):
            self.agent(name)
        self.wait_for_nodes(2)

    def local(self, speeds: Sequence[float]) -> Self:
        """One controller with its own etcd, and an agent for each speed; ready when this returns."""
        self.controller()
        for index, speed in enumerate(speeds):
            self.agent(f"agent-{index}", speed)
        self.wait_for_nodes(len(speeds))
        return self

    def wait_for_nodes(self, count: int, deadline_s: float = 90) -> None:
        wait_until(
            f"{count} connected nodes",
            lambda: sum(node.connected for node in self.client.nodes().nodes) == count,
            deadline_s,
        )

    # Looking and asking.

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.addresses, timeout_s=60)
        return self._client

    def submit(self, script: str, *arguments: str, workers: tuple[int, int] = (1, 1), **fields: Any) -> str:
        bundle = pack(SCRIPTS / script)
        checkpoint = fields.pop("checkpoint", None) or common.CheckpointPolicy(
            every_steps=fields.pop("checkpoint_every", 10), keep=3, directory=fields.pop("checkpoint_directory", "")
        )
        spec = common.JobSpec(
            name=fields.pop("name", "test"), script=bundle.script, args=arguments, min_workers=workers[0],
            max_workers=workers[1], checkpoint=checkpoint, **fields,
        )  # fmt: skip
        return self.client.submit(spec, bundle.data)

    def job(self, job: str) -> pb.Job:
        return self.client.get(job)

    def wait_for(self, job: str, what: str, condition: Callable[[pb.Job], bool], deadline_s: float = 90) -> pb.Job:
        def seen() -> pb.Job | None:
            now = self.job(job)
            return now if condition(now) else None

        try:
            found = wait_until(what, seen, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; last seen:\n{self.job(job)}\n{self.story(job)}") from None
        assert found is not None
        return found

    def wait_for_step(self, job: str, step: int, *, run: int = 0, deadline_s: float = 90) -> pb.Job:
        return self.wait_for(
            job, f"step {step} in run >= {run}", lambda j: j.run >= run and j.progress.step >= step, deadline_s
        )

    def wait_for_end(self, job: str, deadline_s: float = 90) -> pb.Job:
        return self.wait_for(job, "the job's end", lambda j: j.phase in ENDED, deadline_s)

    def story(self, job: str) -> str:
        events = self.client.events(job)
        return "\n".join(
            f"{event.sequence} [{wire.event_kind(event)}] run {event.run}: {event.text}" for event in events
        )

    def log(self, job: str, rank: int | None = None) -> str:
        return b"".join(chunk.data for chunk in self.client.logs(job, rank=rank)).decode(errors="replace")

    def wait_for_output(self, job: str, text: str, rank: int | None = None) -> None:
        """A log comes a little after what it tells of, the job's end among it."""
        wait_until(f"{text!r} in the output of {job}", lambda: text in self.log(job, rank), 60)

    def worker_pids(self, job: str) -> list[int]:
        return [worker.status.pid for worker in self.job(job).workers]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    assert pid > 0, "there is no such process any more"  # 0 is this process's own group
    os.kill(pid, number)


def kill_quietly(pid: int) -> None:
    """It may be gone with its agent."""
    with suppress(ProcessLookupError):
        kill(pid)


def hurry(out: Path) -> None:
    """What there was to see has been seen: tiny.py trains the rest at full speed."""
    (out / "full-speed").touch()


def trained_samples(out: Path) -> dict[int, dict[int, list[int]]]:
    """{epoch: {step: sample ids}} of the lineage that counts: each step as the newest view of the newest run trained
    it."""
    newest: dict[int, tuple[tuple[int, int], int]] = {}
    trained: dict[tuple[tuple[int, int], int], list[int]] = {}
    for path in sorted(out.glob("run-*-rank-*.jsonl")):
        run = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            step, by = entry["step"], (run, entry["view"])
            if step not in newest or by >= newest[step][0]:
                newest[step] = (by, entry["epoch"])
            trained.setdefault((by, step), []).extend(entry["ids"] if entry["weight"] else [])
    epochs: dict[int, dict[int, list[int]]] = {}
    for step, (by, epoch) in newest.items():
        epochs.setdefault(epoch, {})[step] = trained[by, step]
    return epochs
