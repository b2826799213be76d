"""Options of the commands that start a job, `submit` and `restore`: each declared once, with the field that it sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atoll.cli.commands import strategy_options
from atoll.errors import BadInput

Config = Annotated[Path | None, typer.Option(help="Job file (TOML); flags override it.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show progress until it ends; Ctrl-C detaches.")]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="With --follow: stop following then (exit code 124).")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout; JSON lines with --follow.")]

_OPTIONS: Final[dict[str, Any]] = {
    "module": Annotated[
        str | None,
        typer.Option("--module", "-m", metavar="NAME", help="In place of a script, as `python -m` takes it."),
    ],
    "name": Annotated[
        str | None, typer.Option("--name", help="Name of the job; by default the script's, or the restored job's.")
    ],
    "workers": Annotated[str | None, typer.Option("--workers", metavar="N|MIN:MAX", help="How many devices.")],
    "standby": Annotated[
        int | None, typer.Option("--standby", metavar="N", help="Free devices kept to take the places of lost ones.")
    ],
    "env": Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="Environment of the workers.")],
    "secrets": Annotated[
        list[str] | None,
        typer.Option(
            "--secret", metavar="NAME", help="A variable of yours that the workers get and nobody is shown; repeatable."
        ),
    ],
    "checkpoint.every_steps": Annotated[
        int | None, typer.Option("--checkpoint-every", metavar="STEPS", help="0 = only at the end.")
    ],
    "checkpoint.directory": Annotated[
        str | None,
        typer.Option(
            "--checkpoint-dir", metavar="DIR|URL", help="Absolute path on the nodes, or an object store's URL."
        ),
    ],
    "checkpoint.keep": Annotated[int | None, typer.Option("--keep", help="Complete checkpoints kept.")],
    "checkpoint.keep_every_steps": Annotated[
        int | None,
        typer.Option("--keep-every", metavar="STEPS", help="The first at or after each multiple stays for good."),
    ],
    "max_restarts": Annotated[
        int | None, typer.Option("--max-restarts", help="Failures of the script in a row that are retried.")
    ],
    "split": Annotated[
        str | None, typer.Option("--split", metavar="auto|inverse-time|even", help="Split of the batch.")
    ],
    "adapt.batch": Annotated[
        str | None,
        typer.Option(
            "--adapt-batch", metavar="MIN:MAX", help="Let the controller choose the total batch in this range."
        ),
    ],
    "seed": Annotated[int | None, typer.Option("--seed", help="Seed of the order of samples.")],
    "workdir": Annotated[
        str | None,
        typer.Option("--workdir", metavar="DIR", help="Ship this whole folder; else *.py under the script's."),
    ],
    "requirements": Annotated[
        str | None,
        typer.Option(
            "--requirements",
            metavar="FILE",
            help="As pip takes it: what workers import beside what the nodes have.",
        ),
    ],
}
"""Options by field of the job file; `checkpoint.keep` is field `keep` of its section."""


def _listed() -> Iterator[tuple[str, Any]]:
    yield from _OPTIONS.items()
    yield from strategy_options.submitted()


class JobCommand(strategy_options.OptionsCommand):
    """A command that starts a job: the options of the job and of its strategy."""

    make = staticmethod(cache(lambda: strategy_options.options(_listed)))


def flags(context: typer.Context) -> dict[str, Any]:
    """Return the fields of the job that the command line sets, by name. Raises BadInput, NotFound."""
    from atoll.client.submission import read_requirements

    given = strategy_options.given(context)
    if script := context.params["script"]:
        given["script"] = str(script)
    if args := context.params["args"]:
        given["args"] = tuple(args)
    if (batch := given.get("adapt.batch")) is not None:
        given["adapt.batch"] = batch_range("--adapt-batch", batch)
    if (path := given.get("requirements")) is not None:
        given["requirements"] = read_requirements(Path(path))
    return given


def batch_range(option: str, text: str | None) -> tuple[int, int] | None:
    """Parse the total batches that `option` names. Raises BadInput."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise BadInput(f"{option} {text!r} is not MIN:MAX, least and largest total batch. Write it like 64:1024")
    return int(match[1]), int(match[2])
