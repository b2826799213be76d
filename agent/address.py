"""Finds the address at which the rest of the cluster reaches this machine."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from atoll.errors import BadInput
from atoll.host.routes import address_towards
from atoll.network.rpc import is_loopback, split_address


def route_address(controller: str) -> str:
    """The local IP address of the route to HOST:PORT; 127.0.0.1 for loopback. Raises OSError without such a route."""
    host, port = split_address(controller)
    return "127.0.0.1" if is_loopback(host) else address_towards(host, port or 1)


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
