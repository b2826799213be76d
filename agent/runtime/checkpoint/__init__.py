"""Checkpoints on disk: written whole or not at all, verified when read, fenced against older runs."""

from atoll.agent.runtime.checkpoint.fence import take
from atoll.agent.runtime.checkpoint.files import (
    Candidate,
    Checkpoint,
    as_bytes,
    check_fits,
    from_bytes,
    keep_newest,
    newest,
    newest_valid,
    read,
    write,
)
from atoll.agent.runtime.checkpoint.header import Fingerprint, Header, fingerprint
from atoll.agent.runtime.checkpoint.state import pack_state, unpack_state

__all__ = [
    "Candidate",
    "Checkpoint",
    "Fingerprint",
    "Header",
    "as_bytes",
    "check_fits",
    "fingerprint",
    "from_bytes",
    "keep_newest",
    "newest",
    "newest_valid",
    "pack_state",
    "read",
    "take",
    "unpack_state",
    "write",
]
