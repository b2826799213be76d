"""Options of several commands, each declared once; those of strategies are made from the registry."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer
import typer.main
from typer.core import TyperCommand

from atoll.cli.cluster import connection
from atoll.errors import AtollError, BadInput
from atoll.host.ports import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from atoll.strategies.declaration import Declared

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
_COMPLETE_WITHIN_S: Final = 1.0


def _ids(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of jobs that begin so, for the shell's completion, which waits: nothing where nobody answers."""
    given = context.find_root().params
    address = given.get("controller") or os.environ.get("ATOLL_CONTROLLER") or DEFAULT_ADDRESS
    tls = (given.get("tls_ca"), given.get("tls_cert"), given.get("tls_key"))
    try:
        found = connection.described(connection.Options(address, *tls, _COMPLETE_WITHIN_S)).run(
            lambda client: client.jobs(ended=True)
        )
    except AtollError:
        return []
    return [job.id for job in found if job.id.startswith(incomplete)]


JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Its id, or its name (then the newest of that name).", autocompletion=_ids),
]


SourceName = Annotated[
    str, typer.Argument(metavar="JOB|DIRECTORY|URL", help="Whose checkpoint: a job's, or what lies there.")
]
StepNumber = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Of this step; the newest sound one else.")
]


_KEPT: Final = "atoll.strategy"
"""Key under which a click context keeps the values that were given, by field."""


def given(context: typer.Context) -> dict[str, Any]:
    """Return the values of the command's made options, by the field that each sets, without those left out."""
    return dict(context.meta.get(_KEPT, {}))


def submitted() -> Iterator[tuple[str, Any]]:
    """Yield the options of `--strategy` and of every strategy's settings, each with the field that it sets."""
    from atoll.strategies import registry

    names = "|".join(registry.strategies())
    yield "strategy", Annotated[str | None, typer.Option(metavar=names, help="How workers exchange gradients.")]
    for each in registry.strategies().values():
        yield from _flags(each.name, each.settings, "settings.")
        for name in each.plan_parameters.adjustable():
            help_text = f"{each.name}: let the controller choose the {name}."
            yield f"adapt.{name}", Annotated[bool | None, typer.Option(f"--adapt-{name}", help=help_text)]


def _adjusted() -> Iterator[tuple[str, Any]]:
    from atoll.strategies import registry

    for each in registry.strategies().values():
        yield from _flags(each.name, each.plan_parameters, "")


def _flags(strategy: str, model: type[Declared], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a strategy's model, each with its field behind `prefix`."""
    from atoll.strategies.declaration import Flag

    for name, field in model.model_fields.items():
        for flag in field.metadata:
            if isinstance(flag, Flag):
                option = typer.Option(f"--{name}", metavar=flag.metavar, help=f"{strategy}: {flag.help}")
                yield f"{prefix}{name}", Annotated[_plain(field.annotation) | None, option]


def _plain(annotation: Any) -> Any:
    """Return a field's type as the command line reads it: float for `float | None`, str for words."""
    while not isinstance(annotation, type) and get_args(annotation):
        annotation = get_args(annotation)[0]
    return str if isinstance(annotation, str) else annotation


def options(listed: Callable[[], Iterator[tuple[str, Any]]]) -> list[Any]:
    """Make click's options of fields and annotated types; one that several strategies have comes once."""

    def holder() -> None: ...

    found: dict[str, tuple[str, Any]] = {}
    for field, kind in listed():
        found.setdefault(field.replace("-", "_").replace(".", "_"), (field, kind))
    annotated = {name: kind for name, (_, kind) in found.items()}
    holder.__annotations__ = annotated
    holder.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in annotated.items()]
    )
    app = typer.Typer(add_completion=False)
    app.command()(holder)
    params: list[Any] = typer.main.get_command(app).params
    for param, (field, _) in zip(params, found.values(), strict=True):
        param.expose_value, param.callback = False, _keeper(field)
    return params


def _keeper(field: str) -> Callable[[Any, Any, Any], None]:
    def keep(context: Any, param: Any, value: Any) -> None:
        if value is not None and value != ():
            context.meta.setdefault(_KEPT, {})[field] = value

    return keep


def _command_with(listed: Callable[[], Iterator[tuple[str, Any]]]) -> type[TyperCommand]:
    """Return a kind of command whose further options are made when it is first asked for."""
    made = cache(lambda: options(listed))

    class OptionsCommand(TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            *own, asking_for_help = super().get_params(ctx)
            return [*own, *made(), asking_for_help]

    return OptionsCommand


AdjustCommand: Final = _command_with(_adjusted)
"""`atoll adjust`, with the parameters that plans give a strategy."""

Config = Annotated[Path | None, typer.Option(help="Job file (TOML); flags override it.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show progress until it ends; Ctrl-C detaches.")]
FollowFor = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="With --follow, detach after this time with exit code 124; the job goes on."),
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
    yield from submitted()


JobCommand: Final = _command_with(_listed)
"""A command that starts a job, with the options of the job and of its strategy."""


def flags(context: typer.Context) -> dict[str, Any]:
    """Return the fields of the job that the command line sets, by name. Raises BadInput, NotFound."""
    from atoll.client.submission import read_requirements

    fields = given(context)
    if script := context.params["script"]:
        fields["script"] = str(script)
    if args := context.params["args"]:
        fields["args"] = tuple(args)
    if (batch := fields.get("adapt.batch")) is not None:
        fields["adapt.batch"] = batch_range("--adapt-batch", batch)
    if (path := fields.get("requirements")) is not None:
        fields["requirements"] = read_requirements(Path(path))
    return fields


def batch_range(option: str, text: str | None) -> tuple[int, int] | None:
    """Parse the total batches that `option` names. Raises BadInput."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise BadInput(f"{option} {text!r} is not MIN:MAX, least and largest total batch. Write it like 64:1024")
    return int(match[1]), int(match[2])
