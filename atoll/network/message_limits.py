"""The limits of messages between machines, declared once for those that send and those that check."""

from __future__ import annotations

import re
from typing import Final

PROTOCOL: Final = 1
"""Protocol version of agents and controllers, which must be equal."""
MAX_REASON: Final = 500
"""Characters of why a worker ended."""
MAX_TEXT: Final = 4096
"""Characters of any other text in a message."""

MAX_RANK: Final = 1 << 31
"""Workers of a run are numbered below MAX_WORKERS (atoll.jobs.job_spec), volunteers beyond."""
MAX_SHARD_PIECE: Final = 1 << 20
"""Bytes of a shard that an agent sends at a time."""
MAX_HOLDERS: Final = 64
"""Machines outside of a run that its launch names, for what they hold of its state."""

MAX_JOB_ID: Final = 64
JOB_ID: Final = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{MAX_JOB_ID - 1}}}")
MAX_SHARERS: Final = 64
"""Agents that share one GPU."""
NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HOST: Final = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_%-]{0,252}")
SHA256: Final = re.compile(r"[0-9a-f]{64}")
