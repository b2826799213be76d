"""The port at which a rank takes volunteers' help: ZeroMQ with CURVE, whose key only they are told; they dial in.

A thread hears them, so that nobody waits for a task while the rank computes one itself."""

from __future__ import annotations

import ipaddress
import os
import threading
from typing import Final

import zmq
from zmq.utils import z85

from atoll.agent.runtime.channel import membership
from atoll.agent.runtime.session.session import Session
from atoll.errors import BadInput
from atoll.host.ports import host_and_port
from atoll.strategies.volunteer.task_server import TaskServer
from atoll.v1.agents_pb2 import DataKeys

HEARTBEAT_MS: Final = 1_000
TURN_MS: Final = 50
"""Interval of checks of deadlines, in milliseconds."""
END_S: Final = 5.0
SILENT_MS: Final = 5_000
"""A connection without any sign of life for so long is over; ZeroMQ's own threads give and take them."""


class VolunteerPort:
    """Owns its socket, and says in this worker's signs of life where it is."""

    def __init__(self, session: Session, keys: DataKeys, most_bytes: int) -> None:
        """most_bytes: of a frame. Raises BadInput where nothing can be bound."""
        self._session = session
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.MAXMSGSIZE, most_bytes),
            (zmq.LINGER, 1_000),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
        ):
            self.socket.setsockopt(option, value)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)  # of clients any key: their tickets say who they are
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))
        try:
            self.socket.bind(f"tcp://{host_and_port(_host(session), 0)}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BadInput(f"cannot listen for volunteers: {error}") from error
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None
        """Of the thread, which is then over."""

    def serve(self, server: TaskServer) -> None:
        """Serve volunteers until `close`, and report the port."""
        self._thread = threading.Thread(target=self._run, args=(server,), name="volunteers", daemon=True)
        self._thread.start()
        bound = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        if self._session.link is not None:
            self._session.link.volunteer_port = int(bound.rstrip(b"\0").rpartition(b":")[2])

    def wake(self) -> None:
        """There are tasks to hand out."""
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        if self._session.link is not None:
            self._session.link.volunteer_port = 0
        self._closing.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(timeout=END_S)
            if self._thread.is_alive():
                return  # a daemon: what it uses stays until the process ends
        self.socket.close()
        self._context.term()
        os.close(self._woken)

    def _run(self, server: TaskServer) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                if self._woken in dict(poller.poll(TURN_MS)):
                    os.eventfd_read(self._woken)
                server.receive()
            server.end()
        except Exception as error:  # noqa: BLE001 - the training thread raises it
            self.failure = error
            with server.changed:
                server.changed.notify_all()


def _host(session: Session) -> str:
    """All addresses, for volunteers come from elsewhere; of a cluster on one machine, that alone."""
    address = membership.host(session)
    return address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else "*"
