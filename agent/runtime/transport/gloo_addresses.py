"""Reads the addresses that gloo's workers leave for each other in torch's store, and changes those that cannot be
dialled. Pure.

Each rank of a group puts one value under a key that ends with its number: a name of its host and the address where it
listens, each behind its length, then one number for each rank (gloo, transport/tcp/context.cc). Of two ranks the one
with the higher address dials the other. So where one is reached through a port of this machine, the ends are told
different things: the higher rank the address 0.0.0.0 with that port, lower than any and this machine's own; the lower
rank one that is higher than any, which it never dials."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, replace
from typing import Final

_SIZE: Final = struct.Struct("=Q")
_STORAGE_BYTES: Final = 128  # struct sockaddr_storage
_TAG: Final = b"atoll-rank:"
_FAMILY: Final = struct.Struct("=H")
_PORT: Final = struct.Struct("!H")
_ADDRESS_AT: Final = {socket.AF_INET: 4, socket.AF_INET6: 8}
_ADDRESS_BYTES: Final = {socket.AF_INET: 4, socket.AF_INET6: 16}


@dataclass(frozen=True, slots=True)
class GlooAddress:
    """A value as a rank puts it. rank: in the run, as `tagged` says; -1 where nobody said."""

    host: bytes
    family: int
    port: int
    address: bytes  # sockaddr_storage and what gloo keeps behind it
    numbers: bytes
    rank: int = -1

    @staticmethod
    def parse(value: bytes) -> GlooAddress | None:
        """None for what is no such value."""
        host, rest = _cut(value)
        address, numbers = _cut(rest) if rest is not None else (None, None)
        if host is None or address is None or numbers is None or len(address) < _STORAGE_BYTES or len(numbers) % 8:
            return None
        (family,) = _FAMILY.unpack_from(address)
        if family not in _ADDRESS_AT:
            return None
        (port,) = _PORT.unpack_from(address, 2)
        rank = -1
        if host.startswith(_TAG):
            number, _, host = host[len(_TAG) :].partition(b":")
            rank = int(number)
        return GlooAddress(host, family, port, address, numbers, rank)

    def __bytes__(self) -> bytes:
        host = self.host if self.rank < 0 else _TAG + b"%d:" % self.rank + self.host
        return _SIZE.pack(len(host)) + host + _SIZE.pack(len(self.address)) + self.address + self.numbers

    def tagged(self, rank: int) -> GlooAddress:
        """Add the number of the rank that stores it: two machines behind gateways may have the same address."""
        return replace(self, rank=rank)

    def dialled_at(self, port: int) -> GlooAddress:
        """Return the address for a rank that dials a port of its own machine."""
        return self._at(b"\0" * _ADDRESS_BYTES[socket.AddressFamily(self.family)], port)

    def never_dialled(self) -> GlooAddress:
        """Return the address for a rank that this one dials."""
        return self._at(b"\xff" * _ADDRESS_BYTES[socket.AddressFamily(self.family)], 2**16 - 1)

    def _at(self, raw: bytes, port: int) -> GlooAddress:
        start = _ADDRESS_AT[socket.AddressFamily(self.family)]
        address = bytearray(self.address)
        address[2:4] = _PORT.pack(port)
        address[start : start + len(raw)] = raw
        return replace(self, address=bytes(address), port=port)


def _cut(value: bytes) -> tuple[bytes, bytes] | tuple[None, None]:
    """Split off the bytes that the length in front counts."""
    if len(value) < _SIZE.size:
        return None, None
    (size,) = _SIZE.unpack_from(value)
    end = _SIZE.size + size
    return (value[_SIZE.size : end], value[end:]) if end <= len(value) else (None, None)
