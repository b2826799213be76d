"""A controller and agents on this machine: child processes of an `atoll up`, which may run in the background."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.cli.render import terminal
from atoll.errors import AtollError, Conflict, ControllerUnreachable, DeadlineExceeded
from atoll.host import die_with_parent
from atoll.host.ports import DEFAULT_ADDRESS

READY_WITHIN_S: Final = 60.0
_STOP_WITHIN_S: Final = 10.0
DATA_DIR: Final = Path("~/.atoll")
_SPARE_S: Final = 15.0
_END_WITHIN_S: Final = 20.0
_LOG_EVERY_S: Final = 0.1
_LOCK: Final = "lock"
_LOOK_EVERY_S: Final = 0.2
_NO_MORE: Final[Mapping[str, str]] = {}


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
    """The newest line of a log that says something."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return terminal.printable(lines[-1].strip().removeprefix("error: ")) if lines else ""


class LocalCluster:
    """The children of one `atoll up`. Whoever starts it stops it."""

    def __init__(
        self, data: Path, listen: str, speeds: Sequence[float], gpus: Sequence[Sequence[str]], threads: int
    ) -> None:
        """gpus: of each agent, as CUDA_VISIBLE_DEVICES names them; none: its CPU. One that several have is shared."""
        self._data, self._listen, self._speeds, self._threads = data, listen, speeds, threads
        self._gpus = gpus
        self._sharers = Counter(gpu for own in gpus for gpu in own)
        self._children: list[Child] = []

    async def start(self) -> None:
        """Start the controller, then the agents; they find it when it listens."""
        controller_dir = self._data / "controller"
        await self._spawn("controller", ["controller", "--listen", self._listen, "--data-dir", str(controller_dir)])
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
        """Say so once all agents are connected. Raises DeadlineExceeded where that does not happen in time."""
        from atoll.client.client import AsyncClient

        wanted, connected = {f"local-{number}" for number in range(len(self._speeds))}, set[str]()
        try:
            async with asyncio.timeout(READY_WITHIN_S), AsyncClient([self._listen], timeout_s=1.0) as client:
                while connected != wanted:
                    await asyncio.sleep(_LOOK_EVERY_S)
                    with suppress(ControllerUnreachable):  # not yet
                        reply = await client.nodes()
                        connected = {node.name for node in reply.nodes if node.connected} & wanted
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{len(connected)} of {len(wanted)} agents connected within {READY_WITHIN_S:g} s. "
                f"Their logs: {self._data / 'logs'}"
            ) from error
        self._announce()

    def _announce(self) -> None:
        count = len(self._speeds)
        print(f"ready: {count} agent{'s' if count > 1 else ''}, controller {self._listen}", flush=True)
        other = "" if self._listen == DEFAULT_ADDRESS else f" --controller {self._listen}"
        terminal.note(f"  train  atoll submit train.py --workers {count} --follow{other}")
        terminal.note(f"  look   atoll nodes{other}")
        terminal.note(f"  logs   {self._data / 'logs'}")
        terminal.note("  stop   Ctrl-C")

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


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """One `atoll up` at a time on one data directory; the file says which process that is."""
    import fcntl  # here, for clients on other systems have none

    with (data / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _already_up(data) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _already_up(data: Path) -> Conflict:
    return Conflict(f"another `atoll up` runs with --data-dir {data}. `atoll down` stops it, or name another folder")


def is_up(data: Path) -> bool:
    """Return True if a running `atoll up` uses this data directory."""
    import fcntl

    try:
        with (data / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def holder(data: Path) -> Iterator[int | None]:
    """The `atoll up` that has this data directory, as a descriptor that means no other process; None: nobody has."""
    try:
        pid = int((data / _LOCK).read_text() or 0)
        descriptor = os.pidfd_open(pid)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        yield None
        return
    try:  # only now: a number that was given anew belongs to nobody who holds the lock
        yield descriptor if is_up(data) else None
    finally:
        os.close(descriptor)


def start_detached(data: Path, listen: str, speeds: Sequence[float], threads: int | None, *, share_gpu: bool) -> None:
    """Start an `atoll up` in the background; return when all agents are connected.

    Raises AtollError with its last line if it ends before."""
    if is_up(data):
        raise _already_up(data)
    log = data / "logs" / "up.log"
    options = ["--listen", listen, "--data-dir", str(data), "--speeds", ",".join(f"{speed:g}" for speed in speeds)]
    options += ["--threads", str(threads)] if threads else []
    options += ["--share-gpu"] if share_gpu else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "atoll.cli.main", "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a terminal that is closed ends it no more
        )
    try:
        ready, *more = _said_when_ready(process, log)
    except BaseException:
        process.terminate()
        process.wait(_END_WITHIN_S)
        raise
    print(ready, flush=True)  # it goes on whether anybody reads this or not
    for line in more:
        terminal.note(line)
    terminal.note("  stop   atoll down" + ("" if data == Path("~/.atoll").expanduser() else f" --data-dir {data}"))


def _said_when_ready(process: subprocess.Popen[bytes], log: Path) -> list[str]:
    ends_s = time.monotonic() + READY_WITHIN_S + _SPARE_S
    ended = False
    while True:
        said = log.read_text(errors="replace")
        if said.startswith("ready") and "  logs " in said:
            return [line for line in said.splitlines() if "Ctrl-C" not in line]
        if ended:
            raise AtollError(f"`atoll up` ended with exit code {process.returncode}: {last_line(log)}. Its log: {log}")
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(f"`atoll up` was not ready in time. Its log: {log}")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOG_EVERY_S)
            ended = True


def stop_detached(data: Path) -> bool:
    """End the `atoll up` that has this data directory, also one that is not in the background; False: none has.

    Raises DeadlineExceeded where it does not end."""
    with holder(data) as process:
        if process is None:
            return False
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _END_WITHIN_S)[0]:
            raise DeadlineExceeded(f"`atoll up` on {data} did not end within {_END_WITHIN_S:g} s. See {data / 'logs'}")
    return True
