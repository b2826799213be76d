"""A controller and agents on this machine, as child processes of an `atoll up`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.cli.render import terminal
from atoll.errors import AtollError, ControllerUnreachable, DeadlineExceeded
from atoll.host import die_with_parent, ports
from atoll.host.ports import DEFAULT_ADDRESS

READY_WITHIN_S: Final = 60.0
_STOP_WITHIN_S: Final = 10.0
DATA_DIR: Final = Path("~/.atoll")
_LOOK_EVERY_S: Final = 0.2
DASHBOARD_ADDRESS: Final = "127.0.0.1:8265"
_NO_MORE: Final[Mapping[str, str]] = {}
_DASHBOARD_FILE: Final = "dashboard"
"""File in the controller's data folder that has the page's address, as atoll.dashboard.serve.ADDRESS_FILE names it."""


@dataclass(slots=True)
class Child:
    """One daemon of the cluster, with the file its output goes to."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def how_it_ended(self) -> str:
        """Describe its exit, with the last line that it wrote."""
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        last = last_line(self.log)
        return f"{self.name} {how}" + (f": {last}" if last else "")


def last_line(log: Path) -> str:
    """Return the newest line of a log that is not blank; empty if there is none."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return terminal.printable(lines[-1].strip().removeprefix("error: ")) if lines else ""
    return ""


class LocalCluster:
    """The children of one `atoll up`. Whoever starts it stops it."""

    def __init__(  # noqa: PLR0917
        self,
        data: Path,
        listen: str,
        speeds: Sequence[float],
        gpus: Sequence[Sequence[str]],
        threads: int,
        lock: int | None = None,
    ) -> None:
        """gpus: of each agent, as CUDA_VISIBLE_DEVICES names them; none: its CPU. One that several have is shared.
        lock: a descriptor that the children inherit, so that what it locks is free when the last of them has ended."""
        self._data, self._listen, self._speeds, self._threads = data, listen, speeds, threads
        self._gpus, self._lock = gpus, lock
        self._sharers = Counter(gpu for own in gpus for gpu in own)
        self._children: list[Child] = []

    async def start(self) -> None:
        """Start the controller, then the agents; they find it when it listens."""
        controller_dir = self._data / "controller"
        (controller_dir / _DASHBOARD_FILE).unlink(missing_ok=True)  # of a controller that was killed
        where = ["--listen", self._listen, "--data-dir", str(controller_dir)]
        await self._spawn("controller", ["controller", *where, *_dashboard_options(self._listen)])
        for number, (speed, gpus) in enumerate(zip(self._speeds, self._gpus, strict=True)):
            await self._spawn(
                f"agent-{number}",
                [
                    *("agent", "--controller", self._listen, "--name", f"local-{number}"),
                    *("--state-dir", str(self._data / f"agent-{number}"), "--jobs-dir", str(self._data / "jobs")),
                    *("--speed", f"{speed:g}", "--threads", str(self._threads)),
                    *(["--share-gpu", str(sharers)] if (sharers := self._sharers[gpus[0]] if gpus else 1) > 1 else []),
                ],
                {"CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            )

    async def _spawn(self, name: str, args: Sequence[str], env: Mapping[str, str] = _NO_MORE) -> None:
        log = self._data / "logs" / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *die_with_parent.command([sys.executable, "-P", "-m", "atoll.cli.main", *args]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                process_group=0,  # a Ctrl-C in this terminal reaches only this command, which stops them in order
                pass_fds=() if self._lock is None else (self._lock,),
            )
        self._children.append(Child(name, process, log))

    async def watch_children(self) -> None:
        """Never returns. Raises AtollError naming the first child that ends, how, and its last line."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self._children}
        try:
            ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        first = min((waits[task] for task in ended), key=self._children.index)
        raise AtollError(f"{first.how_it_ended()}. Its log: {first.log}")

    async def announce_when_ready(self) -> None:
        """Print so once all agents are connected. Raises DeadlineExceeded where that does not happen in time."""
        await all_connected(self._data, self._listen, len(self._speeds))
        announce("ready", self._data, self._listen, len(self._speeds), stop="Ctrl-C")

    async def stop(self) -> None:
        """Agents first, then the controller; within 10 s nothing of it is left."""
        ends = time.monotonic() + _STOP_WITHIN_S
        await _stop(self._children[1:], ends - 4.0)
        await _stop(self._children[:1], ends - 1.0)


async def _stop(children: Sequence[Child], until: float) -> None:
    alive = [child for child in children if child.process.returncode is None]
    for child in alive:
        child.process.terminate()
    for child in alive:
        try:
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                await child.process.wait()
        except TimeoutError:
            terminal.note(f"{child.name} did not stop in time; killing it. Its log: {child.log}")
            os.killpg(child.process.pid, signal.SIGKILL)
            await child.process.wait()


def dealt(gpus: Sequence[str], agents: int, *, share: bool = False) -> list[list[str]]:
    """Return the GPUs of each agent, in order and as evenly as it goes.

    Where there are fewer GPUs than agents, agents share one GPU with `share`; else none has any: the workers of a job
    are all on GPUs or all on CPUs."""
    if len(gpus) < agents:
        return [[gpus[len(gpus) * i // agents]] if share and gpus else [] for i in range(agents)]
    return [list(gpus[len(gpus) * i // agents : len(gpus) * (i + 1) // agents]) for i in range(agents)]


async def all_connected(data: Path, listen: str, agents: int, within_s: float | None = None) -> None:
    """Return once all agents of a cluster are connected. Raises DeadlineExceeded, with what the first missing one
    wrote last."""
    from atoll.client.client import AsyncClient

    limit_s = READY_WITHIN_S if within_s is None else within_s
    missing = {f"local-{number}" for number in range(agents)}
    try:
        async with asyncio.timeout(limit_s), AsyncClient([listen], timeout_s=1.0) as client:
            while True:
                with suppress(ControllerUnreachable):  # not yet
                    reply = await client.nodes()
                    missing -= {node.name for node in reply.nodes if node.connected}
                if not missing:
                    return
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError as error:
        first, logs = min(missing), data / "logs"
        wrote = last_line(logs / f"{first.replace('local', 'agent')}.log")
        raise DeadlineExceeded(
            f"{agents - len(missing)} of {agents} agents connected within {limit_s:g} s. "
            f"{first} is missing{f', and wrote last: {wrote}' if wrote else ''}. Their logs: {logs}"
        ) from error


def announce(state: str, data: Path, listen: str, agents: int, stop: str) -> None:
    """Print that a cluster is up: one line on stdout, and on stderr how to use it. stop: how to end it."""
    other = "" if listen == DEFAULT_ADDRESS else f" --controller {listen}"
    print(f"{state}: {agents} agent{'s' * (agents > 1)}, controller {listen}", flush=True)
    terminal.note(f"  train  atoll run train.py{other}")
    page = dashboard_address(data)
    terminal.note(f"  watch  atoll top{other}" + (f", or in a browser {page}" if page else ""))
    terminal.note(f"  logs   {data / 'logs'}")
    terminal.note(f"  stop   {stop}")


def dashboard_address(data: Path) -> str:
    """Return the address of the page that a cluster's controller serves; empty if it serves none."""
    try:
        return (data / "controller" / _DASHBOARD_FILE).read_text().strip()
    except OSError:
        return ""


def _dashboard_options(listen: str) -> list[str]:
    """Return the options with which the controller serves the page; none if what that needs is not installed.

    The cluster at the default address has the page's default port if that is free. Any other has a free port, so that
    clusters that start at the same time do not compete for one."""
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        return []
    host, port = DASHBOARD_ADDRESS.split(":")
    if listen != DEFAULT_ADDRESS:
        return ["--dashboard", f"{host}:0"]
    try:
        ports.listening(host, int(port)).close()
    except OSError:
        port = "0"
    return ["--dashboard", f"{host}:{port}"]
