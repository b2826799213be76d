"""Names in a checkpoint directory: step-000000100-run-000003, and those of folders that come or go."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors
from atoll.errors import NotFound

WRITING: Final = ".writing-"
REMOVING: Final = ".removing-"
WRITER_FILE: Final = ".writer"
_SHARED: Final = "-shared"
_NAME: Final = re.compile(r"step-(\d{9,18})-run-(\d{6,18})")


class Moment(NamedTuple):
    """Run and step of a checkpoint. A higher one is newer, the run first."""

    run: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:09d}-run-{self.run:06d}"

    @staticmethod
    def of(name: str) -> Moment | None:
        """None for a name that no checkpoint has."""
        match = _NAME.fullmatch(name)
        return Moment(int(match[2]), int(match[1])) if match else None


def by_age(directory: Path) -> dict[Moment, Path]:
    """Folders that are named like checkpoints, whole or not, the newest first."""
    if not directory.is_dir():
        return {}
    with disk_errors(f"listing {directory}"):
        named = [(moment, path) for path in directory.iterdir() if (moment := Moment.of(path.name))]
    return dict(sorted(named, reverse=True))


def pick(present: Collection[Moment], step: int | None, where: str) -> list[Moment]:
    """Return the checkpoints of this step, or all, the newest first. Raises NotFound with the steps that are there."""
    meant = sorted((moment for moment in present if step in (None, moment.step)), reverse=True)
    if not meant:
        there = f"step {steps_in_words({moment.step for moment in present})}" if present else "none"
        raise NotFound(f"no checkpoint{'' if step is None else f' of step {step}'} in {where}: there is {there}")
    return meant


def steps_in_words(steps: Collection[int]) -> str:
    """Return the newest ten steps, for people."""
    return ", ".join(map(str, sorted(steps)[-10:]))


def begin(directory: Path, name: str) -> tuple[Path, int]:
    """A folder to write in, and a file there whose lock says that its writer lives. The directory is locked."""
    temporary = directory / f"{WRITING}{name}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary, hold(temporary / WRITER_FILE)


def begin_shard(directory: Path, moment: Moment, shard: int) -> tuple[Path, int]:
    """Begin a folder that all writers of its shards share; otherwise like `begin`."""
    temporary = directory / f"{WRITING}{moment.name}{_SHARED}"
    temporary.mkdir(exist_ok=True)
    file = temporary / f"{WRITER_FILE}-{shard}"
    if file.exists() and not _is_held(file):
        file.unlink()  # its writer died in the middle
    return temporary, hold(file)


def hold(file: Path) -> int:
    """A new file, locked as long as this process has it open."""
    import fcntl  # here, for clients on other systems read these names too, and have none

    held = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def discard(path: Path) -> None:
    """Remove a checkpoint such that a half-removed one has not its name any more. The directory is locked."""
    if path.exists():
        doomed = path.with_name(f"{REMOVING}{path.name}-{secrets.token_hex(4)}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what stays is swept later


def sweep(directory: Path, begins: Moment) -> None:
    """Remove what dead writers left. A live one holds the lock of a file there. Of a folder that several share, some
    may not have begun: it stays until a later checkpoint `begins`. The directory is locked."""
    with disk_errors(f"listing {directory}"):
        left = [path for path in directory.iterdir() if path.name.startswith((WRITING, REMOVING))]
    for path in left:
        shared = Moment.of(path.name.removeprefix(WRITING).removesuffix(_SHARED))
        if path.name.startswith(REMOVING) or not ((shared is not None and shared >= begins) or has_live_writer(path)):
            shutil.rmtree(path, ignore_errors=True)  # not worth failing a checkpoint; the next one tries again


def has_live_writer(temporary: Path) -> bool:
    """The directory is locked."""
    with disk_errors(f"listing {temporary}"):
        try:
            files = list(temporary.iterdir())  # the lock's file was made under the directory's lock, which we hold
        except FileNotFoundError:  # its writer found the same checkpoint whole, and removes its own without the lock
            return False
    return any(_is_held(file) for file in files)


def _is_held(file: Path) -> bool:
    import fcntl

    try:
        opened = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to judge
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False
