"""The interpreter and environment of a worker, beside its launch: a process can be there before its launch is known.

Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_OF_EXEC: Final = ("PYTHON", "LD_")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A process that waits serves a launch which asks for an equal one, and no other."""

    command: tuple[str, ...]
    """Up to the program, to which its arguments are added."""
    env: Mapping[str, str]
    """All but the variables of the launch."""
    job: str
    """Whose own variables and secrets are among them; empty: nobody's, any job that has none may have it."""


def can_wait(env: Mapping[str, str], own: Iterable[str]) -> bool:
    """Whether a process may be executed before its launch. own: the names that the job itself sets.

    Not with what the job tells the interpreter or the loader, nor where modules are looked for from the working folder
    on: exec alone makes that hold."""
    if any(name.startswith(_OF_EXEC) for name in own):
        return False
    path = env.get("PYTHONPATH")
    return not path or all(os.path.isabs(part) for part in path.split(os.pathsep))
