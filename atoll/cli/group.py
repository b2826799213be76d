"""The command's outermost shell: global options anywhere, errors as one line, every end with its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import typer

from atoll.cli.render.help import TidyGroup
from atoll.cli.render.terminal import complain, note, printable
from atoll.errors import AtollError
from atoll.errors.exit_codes import INTERRUPTED

# Typer brings its own copy of click, or uses the installed one, by version: found through a class that is public.
_USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]

_ANYWHERE: Final = frozenset({"--controller", "--tls-ca", "--tls-cert", "--tls-key", "--timeout"})
"""Global options. They may stand before and after the command, so no command has an option of these names."""


def hoist(args: Sequence[str]) -> list[str]:
    """Move global options to the front, so that `atoll jobs --controller X` works like `atoll --controller X jobs`."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            return [*front, *rest, word, *words]
        if word in _ANYWHERE:
            front += [word, *(value for value in [next(words, None)] if value is not None)]
        elif word.partition("=")[0] in _ANYWHERE:
            front.append(word)
        else:
            rest.append(word)
    return [*front, *rest]


class AtollGroup(TidyGroup):
    """The root command."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run one command and end the process with its exit code."""
        words = hoist(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, prog_name or "atoll", complete_var, False, windows_expand_args, **extra)
        except AtollError as error:
            complain(str(error))
            for more in getattr(error, "__notes__", ()):
                note(printable(more))
            code = error.exit_code
        except typer.Abort:
            code = INTERRUPTED
        except _USAGE_ERROR as error:
            complain(_usage(error))
            code = 2
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> str:
    message = error.format_message().rstrip(".")
    if message.startswith("No such command 'plan'"):
        message = "No such command 'plan'. `atoll decide PLANNER` runs a planner, `atoll plans JOB` lists a job's plans"
    path = error.ctx.command_path if error.ctx is not None else "atoll"
    takes_script = path.endswith((" submit", " run"))
    hint = ". The script's own arguments follow `--`" if takes_script and "option" in message else ""
    end = "" if message.endswith("?") else "."
    return f"{message}{hint}{end} See `{path} --help`"
