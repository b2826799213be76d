"""An `atoll up` in the background: the lock that names it, its start and its end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from atoll.cli.cluster.local_cluster import DATA_DIR, READY_WITHIN_S, all_connected, last_line
from atoll.cli.render import terminal
from atoll.errors import AtollError, Conflict, DeadlineExceeded

if TYPE_CHECKING:
    from typing import TextIO

_LOCK: Final = "lock"
_SPARE_S: Final = 15.0
_END_WITHIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.1
_NAMED_WITHIN_S: Final = 1.0
"""Time between a process's lock and its name in the file, at most."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of an `atoll up`. speeds: one for each agent."""

    listen: str
    speeds: tuple[float, ...]
    threads: int | None = None
    share_gpu: bool = False


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """An `atoll up` that has a data directory: its process, its address and the speeds of its agents."""

    pid: int
    listen: str
    speeds: tuple[float, ...]


@contextmanager
def locked(data: Path, listen: str, speeds: Sequence[float]) -> Iterator[TextIO]:
    """Lock a data directory for one `atoll up`, which the file names. Yield the open file. Raises Conflict.

    The name of one that ends in order is removed: a name that is left belongs to one that was killed."""
    import fcntl  # here, for clients on other systems have none

    with (data / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise already_up(data, running(data)) from error
        file.truncate(0)
        file.write(json.dumps(asdict(RunningCluster(os.getpid(), listen, tuple(speeds)))))
        file.flush()
        try:
            yield file
        finally:
            file.truncate(0)


def already_up(data: Path, found: RunningCluster | None) -> Conflict:
    """Return the error for a data directory that another `atoll up` has."""
    what = f" with {count_of_agents(found.speeds)} at {found.listen}" if found else ""
    return Conflict(
        f"`atoll up` runs already on --data-dir {data}{what}. `{stop_command(data)}` stops it, or name another folder"
    )


def count_of_agents(speeds: Sequence[float]) -> str:
    """Return '1 agent' or '3 agents'."""
    return f"{len(speeds)} agent{'s' * (len(speeds) > 1)}"


def stop_command(data: Path) -> str:
    """Return the command that ends the cluster of a data directory."""
    return "atoll down" + ("" if data == DATA_DIR.expanduser() else f" --data-dir {data}")


def is_locked(data: Path) -> bool:
    """Return True if an `atoll up`, or a child of one that was killed, has this data directory."""
    import fcntl

    try:
        with (data / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _named(data: Path) -> RunningCluster | None:
    """Return the `atoll up` that the lock file names, alive or not."""
    try:
        found = json.loads((data / _LOCK).read_text())
        return RunningCluster(found["pid"], found["listen"], tuple(found["speeds"]))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def running(data: Path) -> RunningCluster | None:
    """Return the `atoll up` that has this data directory; None if none has."""
    ends_s = time.monotonic() + _NAMED_WITHIN_S
    while is_locked(data):
        if (found := _named(data)) is not None:
            return found if _is_alive(found.pid) else None
        if time.monotonic() > ends_s:
            return None
        time.sleep(_LOOK_EVERY_S)
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.close(os.pidfd_open(pid))
    except ProcessLookupError:
        return False
    return True


def clear_killed(data: Path) -> None:
    """Wait for the children of an `atoll up` that was killed, and print that it is replaced.

    Raises DeadlineExceeded if they do not end."""
    left = _named(data)
    if left is None or running(data) is not None:
        return
    terminal.note(f"the cluster of {data} was killed, or the machine restarted: replacing it. Its jobs go on")
    ends_s = time.monotonic() + _END_WITHIN_S
    while is_locked(data):  # the kernel has told its children to end
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(
                f"`atoll up` on {data}, process {left.pid}, was killed, and its children did not end within "
                f"{_END_WITHIN_S:g} s. See their logs in {data / 'logs'}, and end them"
            )
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def holder(data: Path) -> Iterator[int | None]:
    """Yield the `atoll up` that has this data directory, as a descriptor that means no other process; else None."""
    found = _named(data)
    try:
        descriptor = os.pidfd_open(found.pid) if found else None
    except ProcessLookupError:
        descriptor = None
    if descriptor is None:
        yield None
        return
    try:  # only now: a number that was given anew belongs to nobody who holds the lock
        yield descriptor if is_locked(data) else None
    finally:
        os.close(descriptor)


def log_of(data: Path) -> Path:
    """Return the log of an `atoll up` in the background."""
    return data / "logs" / "up.log"


def start(data: Path, options: ClusterOptions) -> None:
    """Start an `atoll up` in the background; return when all agents are connected.

    Raises AtollError with its last line if it ends before, DeadlineExceeded if agents are missing."""
    log = log_of(data)
    words = ["--listen", options.listen, "--data-dir", str(data)]
    words += ["--speeds", ",".join(f"{speed:g}" for speed in options.speeds)]
    words += ["--threads", str(options.threads)] if options.threads else []
    words += ["--share-gpu"] if options.share_gpu else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "atoll.cli.main", "up", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a terminal that is closed ends it no more
        )
    try:
        asyncio.run(_until_ready(process, data, options, log))
    except BaseException:
        process.terminate()
        process.wait(_END_WITHIN_S)
        raise


async def _until_ready(process: subprocess.Popen[bytes], data: Path, options: ClusterOptions, log: Path) -> None:
    within_s = READY_WITHIN_S + _SPARE_S  # its own deadline comes first, with what its agents wrote
    connecting = asyncio.create_task(all_connected(data, options.listen, len(options.speeds), within_s))
    try:
        while not connecting.done():
            if process.poll() is not None:
                why = f"`atoll up` ended with exit code {process.returncode}: {last_line(log)}"
                raise AtollError(f"{why}. Its log: {log}")
            await asyncio.wait({connecting}, timeout=_LOOK_EVERY_S)
        await connecting
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)


def stop(data: Path) -> bool:
    """End the `atoll up` that has this data directory, also one that is not in the background; False: none has.

    Raises DeadlineExceeded where it does not end."""
    with holder(data) as process:
        if process is None:
            return False
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _END_WITHIN_S)[0]:
            raise DeadlineExceeded(f"`atoll up` on {data} did not end within {_END_WITHIN_S:g} s. See {data / 'logs'}")
    return True
