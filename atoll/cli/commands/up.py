"""atoll up: a whole cluster on this machine, as child processes of this command."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll import die_with_parent
from atoll.cli.commands.daemons import DEFAULT_LISTEN, innermost, need
from atoll.cli.render import terminal
from atoll.errors import AtollError, BadInput, Conflict, ControllerUnreachable, DeadlineExceeded

_READY_WITHIN_S: Final = 60.0
_STOP_WITHIN_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.2
_MAX_AGENTS: Final = 64


def up(
    agents: Annotated[
        int | None, typer.Option(min=1, max=_MAX_AGENTS, help="How many agents.", show_default="1")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option(metavar="S[,S...]", help="Slow agents down to these parts, e.g. 1,0.6,0.3.")
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the controller is reached.")] = DEFAULT_LISTEN,
    data_dir: Annotated[Path, typer.Option(help="State, checkpoints and logs; jobs in it go on.")] = Path("~/.atoll"),
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each worker.", show_default="cores / agents")
    ] = None,
) -> None:
    """Start a controller and agents on this machine; Ctrl-C stops them all.

    atoll up --agents 3 --speeds 1,0.6,0.3
    """
    parts = parse_speeds(speeds, agents)
    data = data_dir.expanduser().absolute()
    each = threads or max(1, (os.cpu_count() or 1) // len(parts))
    need("atoll.controller.daemon", "controller")
    need("atoll.agent.daemon", "agent")
    try:
        (data / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--data-dir {data}: {error.strerror}. Name a folder that you may write to") from error
    with _locked(data):
        check_port(listen)
        received = asyncio.run(_run(Cluster(data, listen, parts, each)))
    raise typer.Exit(130 if received == signal.SIGINT else 0)


async def _run(cluster: Cluster) -> signal.Signals:
    """Start all, wait for a signal, stop all. Raises AtollError where a child ends before."""
    loop, told = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
            loop.add_signal_handler(number, told.put_nowait, number)
    try:
        await cluster.start()
        async with asyncio.TaskGroup() as group:
            signalled = group.create_task(told.get(), name="signals")
            watched = [
                group.create_task(cluster.watch_children(), name="children"),
                group.create_task(cluster.announce_when_ready(), name="readiness"),
            ]
            received = await signalled
            for task in watched:
                task.cancel()
        terminal.note("stopping")
        return received
    except* AtollError as errors:
        raise innermost(errors) from errors
    finally:
        await cluster.stop()


def parse_speeds(speeds: str | None, agents: int | None) -> list[float]:
    """One speed for each agent. Raises BadInput where the numbers do not fit."""
    if speeds is None:
        return [1.0] * (agents or 1)
    try:
        parts = [float(part) for part in speeds.split(",")]
    except ValueError as error:
        raise BadInput(f"--speeds {speeds!r} are not numbers. Write them like 1,0.6,0.3") from error
    if not all(0 < part <= 1 for part in parts):
        raise BadInput(f"--speeds {speeds!r}: each must be above 0 and at most 1. Write them like 1,0.6,0.3")
    if agents is not None and agents != len(parts):
        raise BadInput(f"--speeds names {len(parts)} agents but --agents {agents}. Leave --agents out")
    if len(parts) > _MAX_AGENTS:
        raise BadInput(f"--speeds names {len(parts)} agents. At most {_MAX_AGENTS} run on one machine")
    return parts


def check_port(listen: str) -> None:
    """Raises BadInput where the controller could not listen there, or would be reached from other machines."""
    from atoll.rpc import is_loopback, split_address

    host, port = split_address(listen)
    if not is_loopback(host) or port == 0:
        raise BadInput(
            f"--listen {listen}: `atoll up` serves this machine only, on a port you name, e.g. {DEFAULT_LISTEN}. "
            "For several machines run `atoll controller` and `atoll agent`"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise BadInput(
            f"cannot listen on {listen}: {error.strerror or error}. "
            "See what runs there with `atoll nodes`, or choose another port with --listen"
        ) from error


@dataclass(slots=True)
class Child:
    """One daemon of the cluster, with the file its output goes to."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def how_it_ended(self) -> str:
        """In words, with the last line it wrote."""
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


class Cluster:
    """The children of one `atoll up`. Whoever starts it stops it."""

    def __init__(self, data: Path, listen: str, speeds: Sequence[float], threads: int) -> None:
        self._data, self._listen, self._speeds, self._threads = data, listen, speeds, threads
        self._children: list[Child] = []

    async def start(self) -> None:
        """Start the controller, then the agents; they find it when it listens."""
        controller_dir = self._data / "controller"
        await self._spawn("controller", ["controller", "--listen", self._listen, "--data-dir", str(controller_dir)])
        for number, speed in enumerate(self._speeds):
            await self._spawn(
                f"agent-{number}",
                [
                    *("agent", "--controller", self._listen, "--name", f"local-{number}"),
                    *("--state-dir", str(self._data / f"agent-{number}"), "--jobs-dir", str(self._data / "jobs")),
                    *("--speed", f"{speed:g}", "--threads", str(self._threads)),
                ],
            )

    async def _spawn(self, name: str, args: Sequence[str]) -> None:
        log = self._data / "logs" / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *die_with_parent.command([sys.executable, "-m", "atoll.cli.main", *args]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
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
        from atoll.client import AsyncClient

        wanted, connected = {f"local-{number}" for number in range(len(self._speeds))}, set[str]()
        try:
            async with asyncio.timeout(_READY_WITHIN_S), AsyncClient([self._listen], timeout_s=1.0) as client:
                while connected != wanted:
                    await asyncio.sleep(_LOOK_EVERY_S)
                    with suppress(ControllerUnreachable):  # not yet
                        reply = await client.nodes()
                        connected = {node.name for node in reply.nodes if node.connected} & wanted
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{len(connected)} of {len(wanted)} agents connected within {_READY_WITHIN_S:g} s. "
                f"Their logs: {self._data / 'logs'}"
            ) from error
        self._announce()

    def _announce(self) -> None:
        count = len(self._speeds)
        print(f"ready: {count} agent{'s' if count > 1 else ''}, controller {self._listen}", flush=True)
        other = "" if self._listen == DEFAULT_LISTEN else f" --controller {self._listen}"
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


@contextmanager
def _locked(data: Path) -> Iterator[None]:
    """One `atoll up` at a time on one data directory."""
    with (data / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                f"another `atoll up` runs with --data-dir {data}. Stop it, or name another folder"
            ) from error
        yield
