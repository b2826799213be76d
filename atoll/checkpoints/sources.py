"""Finds the checkpoint that a user means: of a job, in a directory, or in an object store. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from atoll.agent.runtime.checkpoints.disk.folders import by_age, pick, steps_in_words
from atoll.errors import BadInput, CheckpointError, NotFound

if TYPE_CHECKING:
    from atoll.v1.jobs_pb2 import CheckpointsReply, StoredCheckpoint

IN_FILES: Final = ("disk", "store")


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """One of `job`, `directory` and `url` is set. step: what the name itself says, else None."""

    job: str = ""
    directory: Path | None = None
    url: str = ""
    step: int | None = None


def parse(text: str, step: int | None) -> CheckpointSource:
    """Parse a source: a URL has a '://', a directory a '/'; else it is a job. The name of a single checkpoint gives
    its step. Raises BadInput."""
    place, _, last = text.rstrip("/").rpartition("/")
    if "/" not in text and text not in (".", ".."):
        return CheckpointSource(job=text, step=step)
    named = _step_of(last)
    if named is not None and step not in (None, named):
        raise BadInput(f"{text} is the checkpoint of step {named}; --step {step} names another. Leave one of them out")
    if named is None:
        place = text.rstrip("/") or "/"
    step = step if named is None else named
    if "://" in text:
        return CheckpointSource(url=place, step=step)
    return CheckpointSource(directory=Path(place).absolute(), step=step)


def chosen(reply: CheckpointsReply, step: int | None) -> list[StoredCheckpoint]:
    """Return the matching whole checkpoints on disk and in the store, the newest first.

    Raises NotFound with the existing ones, CheckpointError if the requested one is damaged."""
    in_files = [found for found in reply.checkpoints if found.tier in IN_FILES]
    whole = [found for found in in_files if found.health == "complete"]
    meant = [found for found in whole if step in (None, found.step)]
    if meant:
        return meant
    damaged = next((found for found in in_files if step in (None, found.step)), None)
    if damaged is not None:
        raise CheckpointError(f"checkpoint of step {damaged.step} of {reply.job}: {damaged.trouble}")
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = f"step {steps_in_words({found.step for found in whole})}"
    if not whole:
        there = "none. `atoll checkpoints JOB` shows what is in memory"
    notes = "".join(f"; {note}" for note in reply.notes[:4])
    raise NotFound(f"{what} of {reply.job} on disk or in a store: there is {there}{notes}")


def check_directory(directory: Path, step: int | None, note: Callable[[str], None]) -> None:
    """Refuse now what would be refused on the nodes, as far as the directory is on this machine as well.

    Raises NotFound, and CheckpointError where none that is meant is sound."""
    if not directory.is_dir():
        note(f"{directory} is not on this machine; the nodes look for it")
        return
    try:
        from atoll.agent.runtime.checkpoints.disk import listing

        paths = by_age(directory)
    except ModuleNotFoundError:
        return  # the nodes can look
    for moment in pick(paths, step, str(directory)):
        try:
            listing.check_sound(paths[moment])
        except CheckpointError as error:
            if step is not None:
                raise
            note(f"passed over: {error}")
        else:
            return
    raise CheckpointError(f"none of the checkpoints in {directory} can be used")


def check_store(url: str, step: int | None, note: Callable[[str], None]) -> None:
    """Check a store as `check_directory`, as far as this machine reaches it."""
    try:
        from atoll.agent.runtime.checkpoints.disk.store import answered

        present = answered(url, lambda store: store.list()).whole
    except (ModuleNotFoundError, CheckpointError) as error:
        note(f"{url} cannot be looked at from here ({error}); the nodes look")
        return
    pick(present, step, url)


def _step_of(name: str) -> int | None:
    parts = name.split("-")
    fits = len(parts) == 4 and parts[0] == "step" and parts[2] == "run" and parts[1].isdigit() and parts[3].isdigit()
    return int(parts[1]) if fits else None
