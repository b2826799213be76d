"""Runs a command that the kernel ends when this process's parent is gone, even by SIGKILL.

    python -I -S die_with_parent.py SIGNAL PARENT_PID PROGRAM [ARGUMENT...]

A wrapper that becomes the command, because code between fork and exec (`preexec_fn`) may deadlock in a process with
threads. It imports nothing of the project: a user's environment and folder must not reach it. The kernel watches the
thread that started this process: start it from one that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def command(argv: Sequence[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """`argv`, wrapped so that it gets this signal when the calling process ends."""
    return [sys.executable, "-I", "-S", __file__, str(number.value), str(os.getpid()), *argv]


def main(argv: Sequence[str]) -> None:
    number, parent, *to_run = argv
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != int(parent):
        sys.exit(f"parent {parent} ended before {to_run[0]} was started")
    os.execvp(to_run[0], to_run)


if __name__ == "__main__":
    main(sys.argv[1:])
