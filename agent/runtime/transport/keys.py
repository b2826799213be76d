"""CURVE: who a worker is, whom it admits, and the answer that ZeroMQ asks for at each handshake (ZAP, RFC 27)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils import z85

from atoll.errors import BadInput
from atoll.v1.agents_pb2 import DataKeys

KEY_BYTES: Final = 32
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_PARTS: Final = 7  # version, request, domain, address, identity, mechanism, one credential
ZAP_DOMAIN: Final = b"atoll"


@dataclass(frozen=True, slots=True)
class Keys:
    """Raw X25519 keys, 32 bytes each. Raises BadInput where one is not."""

    secret: bytes = field(repr=False)
    public: bytes
    of: Mapping[int, bytes]
    """The public key of each rank."""

    def __post_init__(self) -> None:
        named = [("secret", self.secret), ("public", self.public), *((f"of[{r}]", key) for r, key in self.of.items())]
        for name, key in named:
            if len(key) != KEY_BYTES:
                raise BadInput(f"key {name} has {len(key)} bytes; a raw X25519 key has {KEY_BYTES}")
        if len(set(self.of.values())) != len(self.of):
            raise BadInput("two ranks have the same public key; every rank needs its own")


def generate() -> tuple[bytes, bytes]:
    """A new (secret, public) pair, raw, for runs started by hand."""
    public, secret = zmq.curve_keypair()
    return z85.decode(secret), z85.decode(public)


def keys_of(handed_out: DataKeys, rank: int) -> Keys:
    """Return the keys that the controller gave to this rank."""
    public = dict(enumerate(handed_out.public))
    return Keys(secret=handed_out.secret, public=public[rank], of=public)


def secure_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def secure_client(socket: zmq.Socket[bytes], keys: Keys, rank: int) -> None:
    """Encrypt a connection to `rank`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(keys.of[rank]))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))


class Gatekeeper:
    """Answers ZeroMQ's question who may connect, for all sockets of a context. Owned by their thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name_of: Callable[[bytes], str | None]) -> None:
        """name_of: by a public key, whose it is; None: nobody's who may. As user id it is with each message."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.bind(_ZAP_ADDRESS)
        self.refused = 0
        self._name_of = name_of

    def answer(self) -> None:
        """All that is asked now."""
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._answer_one()

    def _answer_one(self) -> None:
        parts = self.socket.recv_multipart(zmq.NOBLOCK)
        name = None
        if len(parts) == _ZAP_PARTS and parts[0] == b"1.0" and parts[2] == ZAP_DOMAIN and parts[5] == b"CURVE":
            name = self._name_of(parts[6])
        request = parts[1] if len(parts) > 1 else b""
        if name is None:
            self.refused += 1
            self.socket.send_multipart([b"1.0", request, b"400", b"not of this run", b"", b""])
        else:
            self.socket.send_multipart([b"1.0", request, b"200", b"", name.encode(), b""])
