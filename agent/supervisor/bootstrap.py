"""Runs between an agent and the worker it starts: python -I -S bootstrap.py AGENT_PID PROGRAM ARGUMENT...

Asks the kernel to kill this process when the agent dies, then becomes the worker. In a process of its own, because code
between fork and exec of a process with threads (grpc's) may deadlock. Imports nothing of the project: the user's
environment and folder must not reach it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    agent, program, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != agent:  # it died before the kernel was asked
        os._exit(128 + signal.SIGKILL)
    os.execv(program, arguments)


if __name__ == "__main__":
    main()
