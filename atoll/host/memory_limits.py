"""The memory that this process may have: the machine's, or that of the control groups it is in (containers, Slurm)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
_V2: Final = ("memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total_bytes(cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int:
    """The machine's memory, or the least limit around this process."""
    limits = (limit for limit, _ in _limits(cgroups, own))
    return min([int(psutil.virtual_memory().total), *limits])


def available_bytes(cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the memory available without swapping or killing; cached files count as free."""
    left = (max(0, limit - used) for limit, used in _limits(cgroups, own))
    return min([int(psutil.virtual_memory().available), *left])


def _limits(cgroups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each group around this process that has a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            if (found := _limit_of(folder, *names)) is not None:
                yield found
            if folder == root:
                break
            folder = folder.parent


def _limit_of(folder: Path, limit: str, used: str, cached: str) -> tuple[int, int] | None:
    """None where the group is not seen from here, as inside many containers, or has no limit."""
    try:
        most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not most.isdigit():
        return None  # "max"
    return int(most), max(0, now - int(stat.get(cached, 0)))
