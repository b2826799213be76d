"""Messages between a task server and volunteers: a small JSON header, then tensors. Checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from zmq.utils import z85

from atoll.agent.runtime.pipeline.wire import StagePurpose, packed, unpacked
from atoll.errors import BadInput, PeerLost
from atoll.host.ports import host_and_port

MAX_HEADER_BYTES: Final = 4096
MAX_TENSORS: Final = 8
MAX_TENSOR_BYTES: Final = 16 << 20
"""Limit on a tensor, unless larger ones are expected."""
MAX_SERVERS: Final = 64
"""Ranks that a volunteer is told of."""
_HEADER_OF_TENSOR: Final = 8


def written(header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [json.dumps(header).encode(), *(bytes(packed(StagePurpose.FORWARD, one)) for one in tensors)]


def read(frames: list[bytes], most_bytes: int = MAX_TENSOR_BYTES) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """most_bytes: of a tensor. Raises BadInput for what is none of ours."""
    sizes = [len(one) for one in frames]
    if not frames or len(frames) > 1 + MAX_TENSORS or sizes[0] > MAX_HEADER_BYTES or max(sizes) > most_bytes:
        raise BadInput(f"a message of {sizes[:8]} bytes is too large. It was dropped")
    try:
        header = json.loads(frames[0])
        if min(sizes[1:], default=_HEADER_OF_TENSOR) < _HEADER_OF_TENSOR or not isinstance(header, dict):
            raise BadInput("a message is malformed. It was dropped")
        return header, [unpacked(bytearray(one)) for one in frames[1:]]
    except (ValueError, PeerLost, RuntimeError, RecursionError) as error:
        raise BadInput(f"a message is malformed: {error}. It was dropped") from error


def number(header: dict[str, Any], name: str) -> int:
    """Raises BadInput."""
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise BadInput(f"a message's {name} = {str(value)[:80]!r} is no number. It was dropped")
    return value


class Server(NamedTuple):
    """A rank that takes volunteers' help."""

    rank: int
    address: str
    port: int
    public_key: str  # hexadecimal


def listed(servers: Sequence[Server]) -> torch.Tensor:
    """Encode the first MAX_SERVERS servers: uint8 [bytes]."""
    return torch.frombuffer(bytearray(json.dumps(servers[:MAX_SERVERS]).encode()), dtype=torch.uint8)


def from_list(sent: Sequence[torch.Tensor]) -> list[Server]:
    """Raises BadInput for anything else."""
    try:
        found = [Server(*one) for one in json.loads(bytes(sent[0].numpy()))]
        for one in found:
            z85.encode(bytes.fromhex(one.public_key))
            host_and_port(one.address, one.port)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise BadInput(f"the server's list of others is malformed: {error}. Is it of this version?") from error
    return found[:MAX_SERVERS]
