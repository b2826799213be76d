"""A link that carries little, between real sockets."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

LINK_BYTES_PER_S = 4_000_000


class ThinLink:
    """Carries copies to their holder, and an exchange to nobody, LINK_BYTES_PER_S together; answers at once. What it
    has not carried its kernel hardly takes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._copies, self._exchange = self._listening(), self._listening()
        self.endpoint = f"tcp://127.0.0.1:{self._copies.getsockname()[1]}"
        self.exchange = ("127.0.0.1", self._exchange.getsockname()[1])
        self.carried = {"copies": 0, "exchange": 0}
        self._ends = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, name="thin-link")
        self._thread.start()

    @staticmethod
    def _listening() -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        made.bind(("127.0.0.1", 0))
        made.listen()
        return made

    def _serve(self) -> None:
        with (
            self._exchange.accept()[0] as exchange,
            self._copies.accept()[0] as copies,
            socket.create_connection(self._target) as holder,
        ):
            ends, free_s = (exchange, copies, holder, self._ends), time.monotonic()
            while True:
                if not (ready := select.select(ends, [], [], 0.0)[0]):
                    ready, free_s = select.select(ends, [], [])[0], time.monotonic()  # it was idle, not late
                if self._ends in ready:
                    return
                if holder in ready:
                    copies.sendall(holder.recv(65536))
                for name, source in (("exchange", exchange), ("copies", copies)):
                    if source not in ready:
                        continue
                    data = source.recv(4096)
                    if not data:
                        return
                    self.carried[name] += len(data)
                    if source is copies:
                        holder.sendall(data)
                    free_s += len(data) / LINK_BYTES_PER_S
                    select.select([self._ends], [], [], max(free_s - time.monotonic(), 0.0))

    def close(self) -> None:
        os.eventfd_write(self._ends, 1)
        self._thread.join(30)
        for one in (self._copies, self._exchange):
            one.close()
        os.close(self._ends)
