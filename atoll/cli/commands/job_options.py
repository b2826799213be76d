"""Options of the commands that start a job: `submit` and `restore`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.commands import strategy_options
from atoll.errors import BadInput

Standby = Annotated[int | None, typer.Option(metavar="N", help="Free devices kept to take the places of lost ones.")]
CheckpointEvery = Annotated[int | None, typer.Option(metavar="STEPS", help="0 = only at the end.")]
CheckpointDir = Annotated[
    str | None, typer.Option(metavar="DIR|URL", help="Absolute path on the nodes, or an object store's URL.")
]
Keep = Annotated[int | None, typer.Option(help="Complete checkpoints kept.")]
KeepEvery = Annotated[
    int | None, typer.Option(metavar="STEPS", help="The first at or after each multiple stays for good.")
]
MaxRestarts = Annotated[int | None, typer.Option(help="Failures of the script in a row that are retried.")]
Split = Annotated[str | None, typer.Option(metavar="auto|inverse-time|even", help="Of the batch.")]
AdaptBatch = Annotated[
    str | None, typer.Option(metavar="MIN:MAX", help="Let the controller choose the total batch in this range.")
]
Seed = Annotated[int | None, typer.Option(help="Of the order of samples.")]
Config = Annotated[Path | None, typer.Option(help="Job file (TOML); flags override it.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show progress until it ends; Ctrl-C detaches.")]
Env = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Environment of the workers.")]
Secret = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A variable of yours that the workers get and nobody is shown; repeatable."),
]
Workdir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Ship this whole folder; else *.py under the script's.")
]
Module = Annotated[
    str | None,
    typer.Option("--module", "-m", metavar="NAME", help="In place of a script, as `python -m` takes it."),
]
Requirements = Annotated[
    Path | None, typer.Option(metavar="FILE", help="As pip takes it: what workers import beside what the nodes have.")
]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="With --follow: stop following then (exit code 124).")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout; JSON lines with --follow.")]


def flags(context: typer.Context) -> dict[str, Any]:
    """What was given of a job's fields, by their names; None where it was left out. Raises BadInput, NotFound."""
    from atoll.client.submission import read_requirements

    given = context.params
    return {
        "name": given["name"],
        "script": str(given["script"]) if given["script"] else None,
        "module": given["module"],
        "args": tuple(given["args"]) if given["args"] else None,
        "workers": given["workers"],
        "standby": given["standby"],
        "workdir": str(given["workdir"]) if given["workdir"] else None,
        "requirements": read_requirements(given["requirements"]) if given["requirements"] else None,
        "env": given["env"],
        "secrets": given["secret"],
        "checkpoint.every_steps": given["checkpoint_every"],
        "checkpoint.directory": given["checkpoint_dir"],
        "checkpoint.keep": given["keep"],
        "checkpoint.keep_every_steps": given["keep_every"],
        "max_restarts": given["max_restarts"],
        "split": given["split"],
        "seed": given["seed"],
        "adapt.batch": batch_range("--adapt-batch", given["adapt_batch"]),
        **strategy_options.given(context),
    }


def batch_range(option: str, text: str | None) -> tuple[int, int] | None:
    """The total batches that `option` names. Raises BadInput."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise BadInput(f"{option} {text!r} is not MIN:MAX, least and largest total batch. Write it like 64:1024")
    return int(match[1]), int(match[2])
