"""Ports and addresses: those of a controller unless said otherwise, how they are written, and sockets that hold one."""

from __future__ import annotations

import socket
from typing import Final

DEFAULT_PORT: Final = 7700
DEFAULT_ADDRESS: Final = f"127.0.0.1:{DEFAULT_PORT}"
"""Default address of a controller."""
DEFAULT_ETCD_PORT: Final = 2379
_BACKLOG: Final = 128


def bracketed(host: str) -> str:
    """The host as it stands before a port, and in tcp://HOST:PORT: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT as `atoll.network.rpc.split_address` reads it."""
    return f"{bracketed(host)}:{port}"


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there, not blocking; port 0: any that is free. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


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
