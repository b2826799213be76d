"""End the workers of a killed predecessor before anything new starts, by the pid files that it left on disk.

The kernel kills each worker when its agent dies, but not the worker's own children."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.errors import DeadlineExceeded

logger = logging.getLogger(__name__)

_GONE_S: Final = 5.0
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    state: str
    group: int
    session: int
    started_ticks: int
    """Ticks since boot."""


class PidFile:
    """File that identifies a process group by pid, start time and boot, so that no reused pid is ever killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, pid: int, secret: str) -> None:
        """secret: the worker's own, which also identifies processes that left the group."""
        facts = facts_of(pid)
        if facts is not None:
            self._path.write_text(f"{pid} {facts.started_ticks} {_BOOT_ID.read_text().strip()} {secret}\n")

    def read(self) -> tuple[int, int, str] | None:
        """Return (pid, start in ticks, secret), or None if the file is torn or of an earlier boot."""
        try:
            pid, started_ticks, boot_id, secret = self._path.read_text().split()
            return (int(pid), int(started_ticks), secret) if boot_id == _BOOT_ID.read_text().strip() else None
        except (ValueError, FileNotFoundError):
            return None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def facts_of(pid: int) -> ProcessFacts | None:
    """Return the process's entry in /proc, or None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return ProcessFacts(fields[0], int(fields[2]), int(fields[3]), int(fields[19]))


def group_members(pid: int, started_ticks: int) -> list[int]:
    """Return the living processes of the group that `pid` led, if it still is the one that began at `started_ticks`."""
    leader = facts_of(pid)
    if leader is not None and leader.started_ticks != started_ticks:
        return []  # another process has this pid now
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (facts := facts_of(int(entry.name))) is not None:
            ours = facts.group == pid and facts.session == pid and facts.started_ticks >= started_ticks
            if ours and facts.state not in "ZX":
                members.append(int(entry.name))
    return members


def end_escaped(secret: str) -> None:
    """Kill processes that left their worker's process group (a daemon that the script made), found by the worker's
    secret in their environment."""
    mark = f"ATOLL_WORKER_SECRET={secret}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                logger.warning("ending process %s, which outlived its worker", entry.name)
                os.kill(int(entry.name), signal.SIGKILL)


def end_leftovers(folder: Path, deadline_s: float = _GONE_S) -> int:
    """Kill the process groups that the pid files in `folder` name; return their number.

    Raises DeadlineExceeded if one does not end (a process in an uninterruptible wait)."""
    ended = 0
    for path in sorted(folder.glob("*.pid")):
        pid_file = PidFile(path)
        if (facts := pid_file.read()) is not None:
            pid, started_ticks, secret = facts
            if group_members(pid, started_ticks):
                logger.warning("ending process group %d (%s), left over by an earlier agent", pid, path.stem)
                _end_group(pid, started_ticks, time.monotonic() + deadline_s)
                ended += 1
            end_escaped(secret)
        pid_file.remove()
    return ended


def _end_group(pid: int, started_ticks: int, ends_s: float) -> None:
    while members := group_members(pid, started_ticks):
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(
                f"processes {members} of an earlier agent's worker do not end on SIGKILL. They wait for a device or a "
                "network disk; `ps -o pid,stat,wchan,args` shows for what"
            )
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)  # the members are not our children: there is nothing to wait on
