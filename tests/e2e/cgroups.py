"""A control group with a memory limit for the processes of an agent, where this machine lets a test make one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    def __init__(self, folder: Path, *, unified: bool) -> None:
        self.folder = folder
        self._limit, self._used = (
            ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )

    def add(self, pid: int) -> None:
        """Move a process and its children here; what they start later is here too."""
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(ProcessLookupError):
                (self.folder / "cgroup.procs").write_text(str(process.pid))

    def used_bytes(self) -> int:
        return int((self.folder / self._used).read_text())

    def limit(self, bytes: int) -> None:
        (self.folder / self._limit).write_text(str(bytes))


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """Yield a new group without a limit; skip the test where this process may make none. Its processes must be gone
    at the end."""
    unified = (ROOT / "cgroup.controllers").exists()
    folder = ROOT / name if unified else ROOT / "memory" / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here, so memory was NOT limited: {error}")
    group = MemoryGroup(folder, unified=unified)
    try:
        try:
            group.limit(1 << 40)
        except OSError as error:
            pytest.skip(f"the control group has no memory limit here, so memory was NOT limited: {error}")
        yield group
    finally:
        ends = time.monotonic() + 30
        while folder.exists() and time.monotonic() < ends:
            with suppress(OSError):
                folder.rmdir()
