"""Runs a command on some processors, with memory of their NUMA node.

    python -I -S on_numa_node.py NODE CPU,CPU,... PROGRAM [ARGUMENT...]

A wrapper that becomes the command, as atoll/host/die_with_parent.py is. The command, its threads and its children
inherit both, from their first page on. It imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from typing import Final

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}  # system call numbers: not every machine has libnuma
_MPOL_PREFERRED: Final = 1  # linux/mempolicy.h: of this node first, then of others, where MPOL_BIND would kill
_MASK_BITS: Final = 1024


def command(argv: Sequence[str], node: int, cpus: Sequence[int]) -> list[str]:
    """Return `argv`, wrapped so that it runs on these processors."""
    return [sys.executable, "-I", "-S", __file__, str(node), ",".join(map(str, cpus)), *argv]


def main(argv: Sequence[str]) -> None:
    node, cpus, *to_run = argv
    try:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
        _prefer_memory_of(int(node))
    except OSError as error:  # a processor was taken away since the agent looked: slower, and no reason not to train
        print(f"atoll: not bound to NUMA node {node}: {error}", file=sys.stderr)
    os.execvp(to_run[0], to_run)


def _prefer_memory_of(node: int) -> None:
    """Prefer memory of this node even if the agent was started with another policy. By default pages come from the node
    whose processor touches them first. Containers often forbid the call; then it has no effect."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None and node < _MASK_BITS:
        mask = (1 << node).to_bytes(_MASK_BITS // 8, sys.byteorder)
        ctypes.CDLL(None).syscall(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(_MASK_BITS))


if __name__ == "__main__":
    main(sys.argv[1:])
