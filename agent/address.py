"""Finds the address and the interface of this machine that lead to the rest of the cluster."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import psutil

from atoll.errors import BadInput
from atoll.rpc import is_loopback, split_address


def route_address(controller: str) -> str:
    """The local IP address of the route to HOST:PORT; 127.0.0.1 for loopback. Raises OSError without such a route."""
    host, port = split_address(controller)
    if is_loopback(host):
        return "127.0.0.1"
    family, kind, protocol, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that carries `address` ("eth0"; "lo" for loopback), or None where none does.

    gloo and NCCL otherwise guess one from the host's name, which is often the wrong one or 127.0.1.1."""
    if is_loopback(address):
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


async def local_address(given: str | None, controller: str) -> str:
    """The IP address where other nodes reach this one. Raises BadInput for a `given` name that does not resolve,
    OSError where no route leads to the controller."""
    host, _ = split_address(controller)
    if given is None:
        if is_loopback(host):
            return "127.0.0.1"
        return await asyncio.to_thread(route_address, controller)  # asks the name server
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        pass
    try:
        found = await asyncio.to_thread(socket.getaddrinfo, given, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"address {given!r} is no IP address and no name that resolves ({error})") from error
    return str(found[0][4][0])
