"""Which processes a test started, and which of them others use after it."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import glob
from typing import Final

import psutil

PIDS: Final[set[int]] = set()
"""Whoever started these ends them, and answers for what they start."""


def is_shared(process: psutil.Process) -> bool:
    """Return whether the process, or one that it descends from, is among PIDS."""
    try:
        return any(one.pid in PIDS for one in (process, *process.parents()))
    except psutil.NoSuchProcess:
        return False


def descendants() -> set[psutil.Process]:
    """Return the processes that this one started, and those that they did. Where the kernel lists a process's children
    psutil is not asked: it looks at every process of the machine, most of what a short test took."""
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        return set(psutil.Process().children(recursive=True))
    found, waiting = set[psutil.Process](), [os.getpid()]
    while waiting:
        for task in glob(f"/proc/{waiting.pop()}/task/*/children"):
            children: list[int] = []
            with suppress(OSError), open(task) as file:  # here as below it may end meanwhile
                children = [int(pid) for pid in file.read().split()]
            for pid in children:
                with suppress(psutil.NoSuchProcess):
                    found.add(psutil.Process(pid))
                    waiting.append(pid)
    return found
