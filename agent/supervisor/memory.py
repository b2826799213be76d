"""Folders in shared memory for checkpoints that outlive their workers: /dev/shm/atoll-.../JOB, and one on disk for what
does not fit.

A folder is kept while its job may resume. The agent reports the jobs whose folders it has, and removes one when the
controller answers that the job is over or unknown. An agent that shuts down removes all of them: its workers have saved
to disk by then. A killed agent leaves them for its successor."""

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

from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.errors import BadInput
from atoll.host.memory_limits import available_bytes, total_bytes
from atoll.network.message_limits import JOB_ID
from atoll.v1.worker_pb2 import Welcome

logger = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")
LEAST_BYTES: Final = 256 << 20
"""Smallest usable /dev/shm. Many containers have 64 MB."""
MAX_JOBS: Final = 256
_OF_AVAILABLE: Final = 0.5
"""Share of the available memory for checkpoints; the rest is the workers'."""
_OF_DISK: Final = 0.5
"""Share of the free disk for shards; the rest is for checkpoints, code and logs."""
_ON_DISK: Final = "memory"  # in the state directory


class MemoryFolders:
    """Folders of all jobs. Used on the agent's event loop; the state directory's lock excludes other agents."""

    def __init__(self, state_dir: Path, shared_memory: Path = SHARED_MEMORY) -> None:
        """Raises BadInput if another user has a folder of that name, OSError if it cannot be made."""
        self.root = root_of(state_dir, shared_memory)
        self.warning = "" if self.root.parent == shared_memory else _not_in_memory(self.root, shared_memory)
        """Reason, for the user, why the folders are not in memory; else empty."""
        self.spill = state_dir / _ON_DISK
        """Folder of shards that do not fit into memory."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        found = self.root.lstat()  # /dev/shm is shared by all users
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise BadInput(f"{self.root} is not this user's alone. Remove it; checkpoints in memory go there")
        for left in self.jobs:
            logger.info("job %s has checkpoints in memory from an earlier agent; kept until its end is known", left)

    @property
    def jobs(self) -> list[str]:
        """List the jobs with checkpoints here."""
        roots = [root for root in (self.root, self.spill) if root.is_dir()]
        return sorted({path.name for root in roots for path in root.iterdir() if JOB_ID.fullmatch(path.name)})[
            :MAX_JOBS
        ]

    def offer(self, welcome: Welcome, job: str, workers: int) -> str:
        """Set in a worker's Welcome where its checkpoints may be; `workers`: of the job on this node. Return a warning,
        or ""."""
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
        """Return the job's folder. Raises OSError."""
        folder = self.root / job
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def most_bytes(self) -> int:
        """Return the capacity for all jobs' checkpoints, with nothing else there."""
        return min(shutil.disk_usage(self.root).total, int(_OF_AVAILABLE * total_bytes()))

    def room_bytes(self, job: str, workers: int) -> int:
        """Return the memory for each worker of the job: its share of free and already used bytes."""
        free = shutil.disk_usage(self.root).free
        return (min(free, int(_OF_AVAILABLE * available_bytes())) + _held_bytes(self.root / job)) // workers

    def spill_bytes(self, job: str, workers: int) -> int:
        """Return the disk space for each worker of the job, likewise."""
        free = shutil.disk_usage(self.spill.parent).free
        return (int(_OF_DISK * free) + _held_bytes(self.spill / job)) // workers

    def shard_folders(self, job: str) -> ShardFolders:
        """Return the folders with the job's shards; empty if `job` is not a job id."""
        return ShardFolders(self.root / job, self.spill / job) if JOB_ID.fullmatch(job) else ShardFolders(None)

    def drop(self, job: str) -> None:
        """Remove the checkpoints of a job that needs them no more."""
        if JOB_ID.fullmatch(job):
            for root in (self.root, self.spill):
                _remove(root / job)

    def close(self) -> None:
        for root in (self.root, self.spill):
            _remove(root)


def root_of(state_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the folder with the jobs' folders: in shared memory, or in the state directory if that is too small."""
    if _total_bytes(shared_memory) < LEAST_BYTES:
        return state_dir / _ON_DISK
    name = hashlib.blake2b(os.fsencode(state_dir.absolute()), digest_size=8).hexdigest()
    return shared_memory / f"atoll-{os.geteuid()}-{name}"


def _not_in_memory(root: Path, shared_memory: Path) -> str:
    return (
        f"{shared_memory} has {naturalsize(_total_bytes(shared_memory))}, checkpoints in memory need "
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
