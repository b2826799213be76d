"""Ports: where a controller is reached unless said otherwise, and one that stays free until someone listens on it."""

from __future__ import annotations

import socket
from typing import Final

DEFAULT_PORT: Final = 7700
DEFAULT_ADDRESS: Final = f"127.0.0.1:{DEFAULT_PORT}"
"""Of a controller."""
DEFAULT_ETCD_PORT: Final = 2379


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket on a free port of `host`. Until it is closed neither an outgoing connection nor anyone who asks for any
    free port gets that one; who names it and sets SO_REUSEADDR, as etcd, gRPC and TCPStore do, can listen on it, again
    and again."""
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError:
        held.close()
        raise
    return held
