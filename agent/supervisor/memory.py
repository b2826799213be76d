"""Folders in this machine's memory, where workers of a job keep checkpoints that outlive them: /dev/shm/atoll-.../JOB.
Beside it there is one on disk for what does not fit.

A folder lives as long as its job may come back. The agent tells the controller whose state it holds and removes it when
the controller answers that the job is over, or that it knows no such job. An agent that ends on purpose takes all of
them with it: its workers have written to disk then. One that was killed leaves them, and the next one finds them."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from humanize import naturalsize

from atoll.agent.memory_limits import available_bytes, total_bytes
from atoll.agent.runtime.checkpoints.memory.shards.shard_folders import ShardFolders
from atoll.errors import BadInput
from atoll.network.message_limits import JOB_ID
from atoll.v1.worker_pb2 import Welcome

logger = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")
LEAST_BYTES: Final = 256 << 20
"""A smaller /dev/shm (64 MB in many containers) is left alone."""
MAX_JOBS: Final = 256
_OF_AVAILABLE: Final = 0.5
"""The rest of the memory that is available stays with the workers."""
_OF_DISK: Final = 0.5
"""Of what is free there; the rest is for checkpoints, code and logs."""
_ON_DISK: Final = "memory"  # in the state directory


class MemoryFolders:
    """All methods on the agent's event loop. The state directory's lock keeps other agents away from the same ones."""

    def __init__(self, state_dir: Path, shared_memory: Path = SHARED_MEMORY) -> None:
        """Raises BadInput where somebody else has the folder's name, OSError where it cannot be made."""
        self.root = root_of(state_dir, shared_memory)
        self.warning = "" if self.root.parent == shared_memory else _not_in_memory(self.root, shared_memory)
        """Where the folders are not in memory: why, for people."""
        self.spill = state_dir / _ON_DISK
        """Where shards lie for which memory has no room."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        found = self.root.lstat()  # /dev/shm is everybody's
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise BadInput(f"{self.root} is not this user's alone. Remove it; checkpoints in memory go there")
        for left in self.jobs:
            logger.info("job %s has checkpoints in memory from an earlier agent; kept until its end is known", left)

    @property
    def jobs(self) -> list[str]:
        """Whose checkpoints are here."""
        roots = [root for root in (self.root, self.spill) if root.is_dir()]
        return sorted({path.name for root in roots for path in root.iterdir() if JOB_ID.fullmatch(path.name)})[
            :MAX_JOBS
        ]

    def offer(self, welcome: Welcome, job: str, workers: int) -> str:
        """Say to one of so many workers of the job where its checkpoints may be. Returns what to warn of, if any."""
        warning = self.warning
        try:
            self.of(job)
            welcome.memory_bytes = self.room_bytes(job, workers)
            welcome.memory_directory = str(self.root / job)
        except OSError as error:
            warning = f"no checkpoints in memory on this machine: {error}"
        with suppress(OSError):
            welcome.spill_bytes = self.spill_bytes(job, workers)
            welcome.spill_directory = str(self.spill / job)
        return warning

    def of(self, job: str) -> Path:
        """The job's folder. Raises OSError."""
        folder = self.root / job
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def most_bytes(self) -> int:
        """For all jobs' checkpoints, with nothing else there."""
        return min(shutil.disk_usage(self.root).total, int(_OF_AVAILABLE * total_bytes()))

    def room_bytes(self, job: str, workers: int) -> int:
        """For each of this many workers of the job: free, or what the job has already."""
        free = shutil.disk_usage(self.root).free
        return (min(free, int(_OF_AVAILABLE * available_bytes())) + _held_bytes(self.root / job)) // workers

    def spill_bytes(self, job: str, workers: int) -> int:
        """The same of the disk."""
        free = shutil.disk_usage(self.spill.parent).free
        return (int(_OF_DISK * free) + _held_bytes(self.spill / job)) // workers

    def shard_folders(self, job: str) -> ShardFolders:
        """Where the job's shards are; empty for what is no job."""
        return ShardFolders(self.root / job, self.spill / job) if JOB_ID.fullmatch(job) else ShardFolders(None)

    def drop(self, job: str) -> None:
        """Nobody will ask for it again."""
        if JOB_ID.fullmatch(job):
            for root in (self.root, self.spill):
                _remove(root / job)

    def close(self) -> None:
        for root in (self.root, self.spill):
            _remove(root)


def root_of(state_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Where the agent of this state directory keeps its jobs' folders: beside it where shared memory has no room."""
    if _total_bytes(shared_memory) < LEAST_BYTES:
        return state_dir / _ON_DISK
    name = hashlib.blake2b(os.fsencode(state_dir.absolute()), digest_size=8).hexdigest()
    return shared_memory / f"atoll-{os.geteuid()}-{name}"


def _not_in_memory(root: Path, shared_memory: Path) -> str:
    return (
        f"{shared_memory} has {naturalsize(_total_bytes(shared_memory))}, checkpoints in memory ask for "
        f"{naturalsize(LEAST_BYTES)}: they are files in {root} instead, and cost that disk its writes. Give it more "
        "(docker run --shm-size, mount -o remount,size=), or set [checkpoint] memory_replicas = 0"
    )


def _total_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).total if os.access(folder, os.W_OK) else 0
    except OSError:
        return 0


def _held_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir()) if folder.is_dir() else 0


def _remove(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder, onerror=_warn)


def _warn(what: object, path: str, error: object) -> None:
    logger.warning("%s stays in memory: %s", path, error)
