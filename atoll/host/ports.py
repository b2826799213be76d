"""Ports and addresses: those of a controller unless said otherwise, how they are written, and sockets that hold one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

DEFAULT_PORT: Final = 7700
DEFAULT_ADDRESS: Final = f"127.0.0.1:{DEFAULT_PORT}"
"""Default address of a controller."""
DEFAULT_ETCD_PORT: Final = 2379
FIRST_PORT: Final = 20_000
LAST_PORT: Final = 31_999
"""Ports of agents, below the usual ephemeral range, whose ports any outgoing connection may take."""
EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BACKLOG: Final = 128


def candidate_ports() -> list[int]:
    """Ports from FIRST_PORT to LAST_PORT that are not handed out to outgoing connections; all of them where all are."""
    low, high = map(int, EPHEMERAL_RANGE.read_text().split())
    return [p for p in range(FIRST_PORT, LAST_PORT + 1) if not low <= p <= high] or list(
        range(FIRST_PORT, LAST_PORT + 1)
    )


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
