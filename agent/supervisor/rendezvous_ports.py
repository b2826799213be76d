"""Ports held free for MASTER_PORT, so that a rendezvous never races another process for one."""

from __future__ import annotations

import errno
import random
import socket
from typing import Final

from atoll.errors import AtollError
from atoll.host.ports import EPHEMERAL_RANGE, FIRST_PORT, LAST_PORT, candidate_ports

HELD: Final = 4


class RendezvousPorts:
    """Holds HELD ports by binding them. Whoever is to listen on one has it released just before."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._candidates = candidate_ports()
        self._refill()

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self._sockets)

    def release(self, port: int) -> None:
        """Make `port` free for its worker and hold another one in its place. A port that is not held is left alone."""
        released = self._sockets.pop(port, None)
        if released is not None:
            self._refill(avoid=port)
            released.close()

    def close(self) -> None:
        for held in self._sockets.values():
            held.close()
        self._sockets.clear()

    def _refill(self, avoid: int = 0) -> None:
        for port in random.sample(self._candidates, min(len(self._candidates), 1000)):
            if len(self._sockets) == HELD:
                return
            if port != avoid and port not in self._sockets and (held := _bind(port)) is not None:
                self._sockets[port] = held
        if not self._sockets:
            raise AtollError(
                f"no free port from {FIRST_PORT} to {LAST_PORT} for the rendezvous of workers. Free some, or narrow "
                f"{EPHEMERAL_RANGE} where it covers this range"
            )


def _bind(port: int) -> socket.socket | None:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.bind(("", port))
    except OSError as error:
        held.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    return held
