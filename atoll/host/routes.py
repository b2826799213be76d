"""Finds the address and the interface of this machine that lead to another one. Workers ask too: no grpc here."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def address_towards(host: str, port: int = 9) -> str:
    """The local IP address of the route to `host`. Raises OSError where there is none, or no such host."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface with this IP address ("eth0"; "lo" for loopback), or None where none has it.

    gloo and NCCL otherwise guess one from the host's name, which is often the wrong one or 127.0.1.1."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        found = (
            entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        if any(ipaddress.ip_address(one) == wanted for one in found):
            return name
    return None
