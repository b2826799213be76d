"""Where `atoll restore` and `atoll export` find a checkpoint: at a job, in a directory, or in an object store."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import BadInput, CheckpointError, NotFound

if TYPE_CHECKING:
    from atoll.agent.runtime.checkpoints.disk.folders import Moment
    from atoll.v1.jobs_pb2 import CheckpointsReply, StoredCheckpoint

SourceName = Annotated[
    str, typer.Argument(metavar="JOB|DIRECTORY|URL", help="Whose checkpoint: a job's, or what lies there.")
]
Step = Annotated[int | None, typer.Option(metavar="N", min=0, help="Of this step; the newest sound one else.")]
IN_FILES = ("disk", "store")


@dataclass(frozen=True, slots=True)
class Source:
    """One of `job`, `directory` and `url` is set. step: what the name itself says, else None."""

    job: str = ""
    directory: Path | None = None
    url: str = ""
    step: int | None = None


def parse(text: str, step: int | None) -> Source:
    """What has a '://' is a URL, what has a '/' a directory, else it is a job. The name of a single checkpoint says its
    step. Raises BadInput."""
    place, _, last = text.rstrip("/").rpartition("/")
    if "/" not in text and text not in (".", ".."):
        return Source(job=text, step=step)
    named = _step_of(last)
    if named is not None and step not in (None, named):
        raise BadInput(f"{text} is the checkpoint of step {named}; --step {step} names another. Leave one of them out")
    if named is None:
        place = text.rstrip("/") or "/"
    step = step if named is None else named
    return Source(url=place, step=step) if "://" in text else Source(directory=Path(place).absolute(), step=step)


def chosen(reply: CheckpointsReply, step: int | None) -> list[StoredCheckpoint]:
    """Those on disk and in the store that are meant, the newest first, whole ones alone.

    Raises NotFound with what is there, CheckpointError where the one that was asked for is damaged."""
    in_files = [found for found in reply.checkpoints if found.tier in IN_FILES]
    whole = [found for found in in_files if found.health == "complete"]
    meant = [found for found in whole if step in (None, found.step)]
    if meant:
        return meant
    damaged = next((found for found in in_files if step in (None, found.step)), None)
    if damaged is not None:
        raise CheckpointError(f"checkpoint of step {damaged.step} of {reply.job}: {damaged.trouble}")
    notes = "".join(f"; {note}" for note in reply.notes[:4])
    raise NotFound(f"{wanted(step)} of {reply.job} on disk or in a store: there is {there(whole)}{notes}")


def wanted(step: int | None) -> str:
    return "no checkpoint" if step is None else f"no checkpoint of step {step}"


def there(found: Iterable[StoredCheckpoint | Moment]) -> str:
    """'step 200 and 400', for people."""
    steps = [str(step) for step in sorted({one.step for one in found})]
    if not steps:
        return "none. `atoll checkpoints JOB` shows what is in memory"
    return f"step {', '.join(steps[-10:])}"


def pick(present: Collection[Moment], step: int | None, where: str) -> list[Moment]:
    """The checkpoints that are meant, the newest first. Raises NotFound with what is there."""
    meant = sorted((moment for moment in present if step in (None, moment.step)), reverse=True)
    if not meant:
        raise NotFound(f"{wanted(step)} in {where}: there is {there(present) if present else 'none'}")
    return meant


def _step_of(name: str) -> int | None:
    parts = name.split("-")
    fits = len(parts) == 4 and parts[0] == "step" and parts[2] == "run" and parts[1].isdigit() and parts[3].isdigit()
    return int(parts[1]) if fits else None
