"""Interpreter and environment of a worker, without its launch: a process can start before its launch is known.

Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_OF_EXEC: Final = ("PYTHON", "LD_")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Command and variables of a process. A prepared process serves only launches with an equal interpreter."""

    command: tuple[str, ...]
    """Command line up to the program."""
    env: Mapping[str, str]
    """All variables but those of the launch."""
    job: str
    """The job whose own variables and secrets are included; empty: none, so any job without own variables may use it.
    """


def can_wait(env: Mapping[str, str], own: Iterable[str]) -> bool:
    """Return True if a process may be executed before its launch. own: names of the variables that the job sets.

    False if the job configures the interpreter or the loader, or if modules are found relative to the working folder:
    these take effect at exec alone."""
    if any(name.startswith(_OF_EXEC) for name in own):
        return False
    path = env.get("PYTHONPATH")
    return not path or all(os.path.isabs(part) for part in path.split(os.pathsep))
