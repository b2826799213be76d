"""Ports for the processes of a test: no other process takes one between its choice and its use."""

from __future__ import annotations

import atexit
import socket
from typing import Final

from atoll.host.ports import hold_port

_HELD: Final[list[socket.socket]] = []  # until this process ends: what a test starts may listen, end and listen again


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens but who is told of it."""
    _HELD.append(hold_port())
    atexit.register(_HELD[-1].close)
    port: int = _HELD[-1].getsockname()[1]
    return port
