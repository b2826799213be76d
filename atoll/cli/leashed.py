"""Run an `atoll` command that ends when its parent does: python -m atoll.cli.leashed PARENT_PID COMMAND ...

`atoll up` starts its children so: even when it is killed with SIGKILL, none is left behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def hold(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM at the parent's death; end at once if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(0)


if __name__ == "__main__":
    hold(int(sys.argv[1]))
    from atoll.cli.main import main

    main(sys.argv[2:])
