"""Run a command that the kernel ends when this process's parent is gone, even by SIGKILL.

    python -m atoll.controller.state.die_with_parent PARENT_PID COMMAND [ARGUMENT...]

A wrapper that becomes the command, because code between fork and exec (`preexec_fn`) is not safe in a process with
threads. The kernel watches the thread that started this process: start it from one that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def command(argv: Sequence[str]) -> list[str]:
    """`argv`, wrapped so that it ends with the calling process."""
    return [sys.executable, "-m", "atoll.controller.state.die_with_parent", str(os.getpid()), *argv]


def main(argv: Sequence[str]) -> None:
    parent, *to_run = argv
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGTERM lets etcd close its files in order; one that does not mind it will not mind a lost machine either.
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != int(parent):
        sys.exit(f"parent {parent} ended before {to_run[0]} was started")
    os.execvp(to_run[0], to_run)


if __name__ == "__main__":
    main(sys.argv[1:])
