"""Ports: one that is held is closed to whoever takes any and open to who names it; addresses as they are written."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

import pytest

from atoll.host.ports import hold_port, host_and_port, listening
from atoll.network.rpc import split_address


def number(held: socket.socket) -> int:
    port: int = held.getsockname()[1]
    return port


def test_who_names_it_listens_and_can_again() -> None:
    with hold_port() as held:
        for _ in range(2):
            server = socket.create_server(("127.0.0.1", number(held)))  # sets SO_REUSEADDR
            with server, socket.create_connection(server.getsockname(), timeout=5):
                server.accept()[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", number(held)), timeout=5)


def test_who_does_not_say_reuse_is_refused() -> None:
    with hold_port() as held, socket.socket() as other, pytest.raises(OSError, match=r"in use") as refused:
        other.bind(("127.0.0.1", number(held)))
    assert refused.value.errno == errno.EADDRINUSE


def test_no_two_get_the_same() -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(hold_port()) for _ in range(500)]
        assert len({number(one) for one in held}) == 500


def test_connections_go_out_by_other_ports() -> None:
    """Half the ports that connections may choose from are the even or the odd ones: thousands. 300 of them held are
    met by 2,000 connections if nothing keeps them apart."""
    with ExitStack() as stack:
        held = {number(stack.enter_context(hold_port())) for _ in range(300)}
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        for _ in range(2000):
            with socket.create_connection(server.getsockname(), timeout=5) as connection:
                assert number(connection) not in held
                server.accept()[0].close()


@pytest.mark.parametrize(
    ("host", "written"), [("head.lab", "head.lab:80"), ("fd00::2", "[fd00::2]:80"), ("*", "*:80"), ("::1", "[::1]:80")]
)
def test_addresses_are_written_as_they_are_read(host: str, written: str) -> None:
    assert host_and_port(host, 80) == written
    assert split_address(written) == (host, 80)


def test_a_port_in_use_is_listened_on_by_no_other() -> None:
    with listening("127.0.0.1", 0) as one:
        assert not one.getblocking()
        with pytest.raises(OSError, match="in use"):
            listening("127.0.0.1", number(one))
