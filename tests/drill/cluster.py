"""The private cluster of a drill: etcd, controllers and agents as processes of this one, on free ports of loopback.

Whatever is started here is stopped here. Every child also ends by itself when this process does, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from atoll.agent.supervisor.memory import root_of
from atoll.agent.supervisor.processes.environment import SECRET
from atoll.agent.supervisor.processes.leftover_processes import PidFile
from atoll.controller.state.etcd_binary import environment, find_etcd
from atoll.errors import BadInput
from atoll.host import die_with_parent
from atoll.host.ports import hold_port
from drill import slow_disk

ETCD_MEMBERS: Final = 3
_STOP_S: Final = 10.0
_GONE_S: Final = 5.0
MARK: Final = "ATOLL_DRILL"
"""In the environment of all that belongs to a drill, with its folder as the value."""


class DrillCluster:
    """Names: etcd-0 ..., controller-0 ..., machine-0 ... . Killing and stopping is by name, and acts at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses: dict[str, str] = {}
        """Of controllers, by name."""
        self._held_ports: list[socket.socket] = []  # while it is there: what is killed comes back on its port
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, Sequence[str]] = {}
        # Its machines are one: no GPU can be a device of several, and only on CPUs are two runs' bits to be equal.
        self._environment = {**environment(), MARK: str(folder), "CUDA_VISIBLE_DEVICES": ""}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def jobs(self) -> Path:
        """The disk that all machines share."""
        return self.folder / "jobs"

    @property
    def evidence(self) -> Path:
        """Where the ranks of the drilled job write it."""
        return self.folder / "out"

    # --- starting

    def start(self, controllers: int, machines: int) -> None:
        """etcd, then controllers, then machines; they find each other when they are up. Raises StoreUnavailable."""
        endpoints = self._start_etcd()
        for number in range(controllers):
            name = f"controller-{number}"
            self.addresses[name] = self._free_address()
            data = str(self.folder / name)
            arguments = ("--listen", self.addresses[name], "--etcd", ",".join(endpoints), "--data-dir", data)
            self._start(name, self._atoll("controller", *arguments))
        for number in range(machines):
            self._start_machine(f"machine-{number}")

    def _start_machine(self, name: str) -> None:
        arguments = (
            "--controller", ",".join(self.addresses.values()), "--name", name, "--state-dir", str(self.folder / name),
            "--jobs-dir", str(self.jobs), "--threads", "1",
        )  # fmt: skip
        self._start(name, self._atoll("agent", *arguments))

    def _start_etcd(self) -> list[str]:
        binary = str(find_etcd().path)
        members = [f"etcd-{number}" for number in range(ETCD_MEMBERS)]
        clients = [self._free_address() for _ in members]
        peers = [self._free_address() for _ in members]
        everyone = ",".join(f"{name}=http://{peer}" for name, peer in zip(members, peers, strict=True))
        for name, client, peer in zip(members, clients, peers, strict=True):
            argv = (
                binary, f"--name={name}", f"--data-dir={self.folder / name}", f"--listen-client-urls=http://{client}",
                f"--advertise-client-urls=http://{client}", f"--listen-peer-urls=http://{peer}",
                f"--initial-advertise-peer-urls=http://{peer}", f"--initial-cluster={everyone}",
                "--initial-cluster-state=new", "--log-level=warn", "--logger=zap",
            )  # fmt: skip
            self._start(name, die_with_parent.command(argv))
        return clients

    def _free_address(self) -> str:
        self._held_ports.append(hold_port())
        return f"127.0.0.1:{self._held_ports[-1].getsockname()[1]}"

    def _atoll(self, *arguments: str) -> Sequence[str]:
        return die_with_parent.command([sys.executable, "-m", "atoll.cli.main", *arguments])

    def _start(self, name: str, argv: Sequence[str]) -> None:
        self._commands[name] = argv
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, process_group=0
            )

    def restart(self, name: str) -> None:
        """What was killed, with the same data."""
        self._start(name, self._commands[name])

    # --- looking

    def living(self, kind: str) -> list[str]:
        """Names of this kind ("etcd", "controller", "machine") whose processes run, not stopped ones."""
        found = []
        for name, process in self._processes.items():
            if name.startswith(f"{kind}-") and process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    if psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                        found.append(name)
        return found

    def all_living(self, kind: str) -> bool:
        return len(self.living(kind)) == sum(name.startswith(f"{kind}-") for name in self._processes)

    def workers(self) -> dict[int, tuple[str, int]]:
        """By rank: the machine that has it, and its pid. Of workers that are there now, in order of rank."""
        found: dict[int, tuple[str, int]] = {}
        for machine in self.living("machine"):
            living = {process.pid for process in self._processes_of(machine)}
            for path in (self.folder / machine / "pids").glob("*.*.*.pid"):  # JOB.RUN.RANK
                facts = PidFile(path).read()
                if facts is not None and facts[0] in living:
                    found[int(path.name.split(".")[2])] = (machine, facts[0])
        return dict(sorted(found.items()))

    def _processes_of(self, machine: str) -> list[psutil.Process]:
        """Its workers, what waits to be one, and what they have started."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._processes[machine].pid).children(recursive=True)
            return [child for child in children if _is_worker(child)]
        return []

    def savers(self) -> dict[int, tuple[str, int]]:
        """Of `workers`, those that write a checkpoint."""
        writing = slow_disk.writers(self.jobs)
        return {rank: place for rank, place in self.workers().items() if place[1] in writing}

    def fallen(self) -> list[str]:
        """Daemons that are gone, in words. After the last strike is over they ended by themselves."""
        found = []
        for name, process in self._processes.items():
            if process.poll() is not None:
                lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines() or [""]
                found.append(f"{name} ended with {process.returncode}: {lines[-1][-200:]}")
        return found

    # --- striking

    def kill(self, name: str) -> None:
        """SIGKILL to one process. Of a machine the kernel then ends the workers."""
        process = self._processes[name]
        process.kill()
        process.wait(_GONE_S)

    def lose(self, machine: str) -> None:
        """The machine is gone: agent, workers, and what was in its memory."""
        workers = self._processes_of(machine)
        self.kill(machine)
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        psutil.wait_procs(workers, timeout=_GONE_S)
        shutil.rmtree(root_of(self.folder / machine), ignore_errors=True)  # there may be none

    def stop(self, name: str) -> None:
        """SIGSTOP to a controller, or to a machine's agent and its workers: silence, with all connections open."""
        for process in self._processes_of(name) if name.startswith("machine-") else []:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        self._processes[name].send_signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """SIGCONT to all that `stop` stopped."""
        self._processes[name].send_signal(signal.SIGCONT)
        for process in self._processes_of(name) if name.startswith("machine-") else []:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    # --- ending

    def close(self) -> None:
        """Machines, then controllers, then etcd; what does not end in time is killed. Then nothing of it is left."""
        for kind in ("machine", "controller", "etcd"):
            self._end([process for name, process in self._processes.items() if name.startswith(f"{kind}-")])
        for name in self._processes:
            if name.startswith("machine-"):  # a killed agent leaves its own
                shutil.rmtree(root_of(self.folder / name), ignore_errors=True)
        for held in self._held_ports:
            held.close()

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        ends_s = time.monotonic() + _STOP_S
        for process in processes:
            try:
                process.wait(max(0.1, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_GONE_S)

    def left_processes(self) -> list[psutil.Process]:
        """What still carries this drill's mark, children of ours or not."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                marked = process.environ().get(MARK) == str(self.folder)
                if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left_files(self) -> list[Path]:
        """What its machines still have in shared memory."""
        machines = (name for name in self._processes if name.startswith("machine-"))
        return [root for machine in machines if (root := root_of(self.folder / machine)).exists()]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.environ().get(SECRET) is not None and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def fresh_folder() -> Path:
    """A new folder for a drill. Raises BadInput where none can be made."""
    try:
        return Path(tempfile.mkdtemp(prefix="atoll-drill-"))
    except OSError as error:
        raise BadInput(f"no folder can be made in {tempfile.gettempdir()}: {error}. TMPDIR names another") from error
