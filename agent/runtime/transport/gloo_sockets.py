"""The sockets of gloo's process groups, to end its collectives with: its own `abort` does nothing.

A collective whose peer is silent, or waits for somebody who is gone, ends when its connections do. gloo gives nobody
its sockets, so those that appeared while a group was made are looked up, and held under numbers of their own: gloo may
have closed its own since, and the system given the number to a file."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

_DESCRIPTORS: Final = "/proc/self/fd"
_BESIDE: Final = "atoll_gloo"  # torch's names of backends are of lower case


def open_sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, by inode."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed since
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


class GlooSockets:
    """Sockets of the groups that were made since `before` was taken."""

    def __init__(self, before: Collection[int], everyone: Callable[[Sequence[int]], Set[int]]) -> None:
        """before: inodes. everyone: collective; gives the ports at which any rank's gloo listens, of this rank's."""
        new = [number for inode, number in open_sockets().items() if inode not in before]
        self._sockets = [one for number in new if (one := _held(number)) is not None]
        listening = [one.getsockname()[1] for one in self._sockets if _listens(one)]
        ports = everyone(listening)
        # gloo ends the process where its listener fails; and some are another thread's, e.g. of an upload.
        for one in [one for one in self._sockets if _listens(one) or not ports & _ports(one)]:
            self._sockets.remove(one)
            one.close()

    def end(self) -> None:
        """End the connections, here and at the peers. By any thread; again is harmless."""
        for one in self._sockets:
            with suppress(OSError):  # it has ended, or never was connected
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give back the numbers. What gloo has of them stays."""
        for one in self._sockets:
            one.close()
        self._sockets = []


def beside_the_first() -> str:
    """The backend of a gloo group whose sockets the default group's thread serves too. A thread of its own, which gloo
    gives each group, looks around a hundred times a second while nothing comes: half a millisecond in 0.15 s."""
    if _BESIDE not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BESIDE, _beside_the_first, devices=["cpu"])
    return _BESIDE


def _beside_the_first(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    assert dist.group.WORLD is not None  # it was made before
    first: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = first.options._devices, first.options._threads, timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _held(number: int) -> socket.socket | None:
    try:
        one = socket.socket(fileno=os.dup(number))
    except OSError:
        return None
    if one.family in (socket.AF_INET, socket.AF_INET6):
        return one
    one.close()
    return None


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ports(one: socket.socket) -> set[int]:
    ports = {one.getsockname()[1]}
    with suppress(OSError):  # it is not connected
        ports.add(one.getpeername()[1])
    return ports
