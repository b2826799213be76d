"""File of a GPU that agents of this machine share: each holds its lock as long as it lives, the first writes the speed.

A GPU is measured while no other agent has it. An agent that comes later would measure what training leaves of the GPU,
and one that comes at the same time half of it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from atoll.agent.telemetry.devices import Device

logger = logging.getLogger(__name__)


@contextmanager
def lock_files(devices: Sequence[Device]) -> Iterator[dict[int, int]]:
    """Open the files of the shared devices; yield descriptors by the device's index, without those that do not open."""
    opened = {device.index: _opened(device.uuid) for device in devices if device.sharers > 1 and device.uuid}
    with ExitStack() as closing:
        files = {index: file for index, file in opened.items() if file is not None}
        for file in files.values():
            closing.callback(os.close, file)
        yield files


def _opened(uuid: str) -> int | None:
    path = Path(tempfile.gettempdir()) / f"atoll-{uuid}.lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.warning("%s cannot be used (%s): the GPU is measured beside its other agents", path, error.strerror)
        return None
    if os.fstat(file).st_uid == os.getuid():
        return file
    os.close(file)
    logger.warning("%s is another user's: the GPU is measured beside its other agents", path)
    return None


def keep_shared(files: Iterable[int]) -> None:
    """Hold the locks on, shared with later agents, also where the process that took them was killed as it measured."""
    for file in files:
        with suppress(BlockingIOError):  # another agent still measures
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def shared_rate(file: int, measure: Callable[[], float]) -> float:
    """Return the rate that the GPU's first agent measured; this one measures it where it is the first.

    Run by a short process that has the agent's descriptor: the lock stays with the agent. Blocks while another agent
    measures."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)
        written = os.pread(file, 64, 0)
        return float(written) if written else measure()
    os.ftruncate(file, 0)
    rate = measure()
    os.pwrite(file, str(rate).encode(), 0)
    fcntl.flock(file, fcntl.LOCK_SH)
    return rate
