"""The handshake at the relay's door, before bytes pass: which node calls, what for, and the proof that it is that one.

A frame is its length (4 bytes, big-endian) and a JSON object of at most MAX_FRAME_BYTES. The relay begins with 32
random bytes; the answer carries a MAC over them and all that it says, so that what was overheard opens no door twice.
The key of a node is derived from the relay's secret: the relay keeps no list, and no node can speak for another one."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from atoll.errors import BadInput
from atoll.network.message_limits import NODE_NAME

NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
MAX_FRAME_BYTES: Final = 2048
MAX_NOTE: Final = 512
_LENGTH: Final = struct.Struct("!I")
_PURPOSE: Final = b"atoll relay 1"

Want = Literal["stand-by", "dial", "answer"]
_WANTS: Final = ("stand-by", "dial", "answer")


@dataclass(frozen=True, slots=True)
class Call:
    """A caller's request to the relay.

    node: the caller. want: to be notified of dialling nodes ("stand-by"), to be connected with the node `to`
    ("dial"), or to accept the announced link `link` ("answer"). note: for the other end; the relay does not read it."""

    node: str
    want: Want
    to: str = ""
    link: str = ""
    note: str = ""


def node_key(secret: bytes, node: str) -> bytes:
    """Derive the key of one node."""
    return hmac.digest(secret, _PURPOSE + b" node " + node.encode(), hashlib.sha256)


def proven(call: Call, key: bytes, nonce: bytes) -> dict[str, Any]:
    """The frame that says so."""
    return {**asdict(call), "proof": _proof(call, key, nonce).hex()}


def checked(frame: Mapping[str, Any], secret: bytes, nonce: bytes) -> Call | None:
    """Return the call if its proof holds, else None. Raises BadInput for an invalid call."""
    said = {name: frame.get(name, "") for name in (*Call.__slots__, "proof")}
    if not all(isinstance(value, str) for value in said.values()):
        raise BadInput("a call's fields must be strings")
    proof = said.pop("proof")
    sound = NODE_NAME.fullmatch(said["node"]) and said["want"] in _WANTS and len(said["note"]) <= MAX_NOTE
    if not sound or (said["want"] == "dial" and not NODE_NAME.fullmatch(said["to"])):
        raise BadInput("a call names a node, what it wants, whom it dials, and a short note")
    call = Call(**said)
    expected = _proof(call, node_key(secret, call.node), nonce).hex()
    return call if hmac.compare_digest(expected.encode(), proof.encode()) else None


def _proof(call: Call, key: bytes, nonce: bytes) -> bytes:
    said = json.dumps(asdict(call), sort_keys=True).encode()
    return hmac.digest(key, _PURPOSE + nonce + said, hashlib.sha256)


async def exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes and not one more: what follows belongs to the link. Raises ConnectionError at an early end."""
    loop = asyncio.get_running_loop()
    read = bytearray(count)
    left = memoryview(read)
    while left:
        more = await loop.sock_recv_into(connection, left)
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        left = left[more:]
    return bytes(read)


async def read_frame(connection: socket.socket) -> dict[str, Any]:
    """Read the frame that comes next. Raises ConnectionError, BadInput."""
    (length,) = _LENGTH.unpack(await exactly(connection, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise BadInput(f"a frame of {length} bytes is announced; at most {MAX_FRAME_BYTES} are taken")
    try:
        body = json.loads(await exactly(connection, length))
    except ValueError as error:
        raise BadInput(f"a frame of {length} bytes is no JSON") from error
    if not isinstance(body, dict):
        raise BadInput("a frame is no JSON object")
    return body


async def write_frame(connection: socket.socket, body: Mapping[str, Any]) -> None:
    """Send a frame. Raises OSError, BadInput if it is too long."""
    data = json.dumps(body).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise BadInput(f"a frame of {len(data)} bytes; at most {MAX_FRAME_BYTES} are taken")
    await asyncio.get_running_loop().sock_sendall(connection, _LENGTH.pack(len(data)) + data)
