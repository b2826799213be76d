"""The address on which a worker listens, as a short string for the rendezvous."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Final

from atoll.errors import BadInput

_TCP: Final = re.compile(r"tcp://[^\s/]{1,255}:\d{1,5}")
_LOCAL: Final = re.compile(r"ipc://@[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """tcp: for everyone. local: an abstract Unix socket, for members of the same node; the kernel removes it with the
    process."""

    tcp: str
    local: str

    def __str__(self) -> str:
        return f"{self.tcp} {self.local}"

    @staticmethod
    def parse(text: str) -> Endpoint:
        """The reverse of str(). Raises BadInput."""
        tcp, _, local = text[:512].partition(" ")
        if not (_TCP.fullmatch(tcp) and _LOCAL.fullmatch(local) and 0 < int(tcp.rpartition(":")[2]) < 2**16):
            raise BadInput(f"{text[:512]!r} is no endpoint of a worker: it must read 'tcp://HOST:PORT ipc://@NAME'")
        return Endpoint(tcp, local)

    def within_reach(self) -> bool:
        """Return True if the local socket can be connected from here: equal node names do not mean one container."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            return probe.connect_ex("\0" + self.local.removeprefix("ipc://@")) == 0
