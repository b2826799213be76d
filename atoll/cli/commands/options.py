"""Options of several commands, each declared once; those of strategies are made from the registry."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args, get_origin

import typer
import typer.main
from typer.core import TyperCommand

from atoll.cli.cluster import connection
from atoll.cli.render.help import TidyCommand, option, tidy
from atoll.errors import AtollError, BadInput
from atoll.host.ports import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from atoll.strategies.declaration import Strategy

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
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
    typer.Argument(
        metavar="JOB", help="Id of the job, or its name: then the newest job of that name.", autocompletion=_ids
    ),
]


SourceName = Annotated[
    str,
    typer.Argument(metavar="JOB|DIRECTORY|URL", help="Job whose checkpoint is taken, or the place of a checkpoint."),
]
StepNumber = Annotated[
    int | None,
    option(
        "N",
        "Take the checkpoint of this step.",
        "--step",
        min=0,
        rich_help_panel="Checkpoint",
        show_default="the newest sound one",
    ),
]


JOB, STRATEGY, ADAPT, CHECKPOINT, OUTPUT = PANELS = ("Job", "Strategy", "Adapt", "Checkpoint", "Output")
"""Panels of a job's options, in the order of the help."""

_KEPT: Final = "atoll.options"
"""Key under which a click context keeps the values that were given, by field."""

_CHOSEN: Final = "atoll.strategy"
"""Key under which a click context keeps the strategy that the command line names."""

MadeOption: TypeAlias = "tuple[str, Any, Any]"
"""The field that an option sets, its annotated type, and the default to show; None shows none."""

Config = Annotated[
    Path | None, option("FILE", "Read the job from this TOML file; other options override it.", rich_help_panel=JOB)
]
Follow = Annotated[
    bool,
    typer.Option("--follow", "-f", rich_help_panel=OUTPUT, help="Show progress until the job ends; Ctrl-C detaches."),
]
FollowFor = Annotated[
    float | None,
    option(
        "SECONDS",
        "Detach after this time, with exit code 124. The job continues.",
        rich_help_panel=OUTPUT,
        show_default="until the job ends",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", rich_help_panel=OUTPUT, help="Print one JSON document on stdout, with --follow one on each line."
    ),
]


def _option(panel: str, kind: Any, name: str, metavar: str, text: str, **more: Any) -> Any:
    names = (name, *more.pop("also", ()))
    return Annotated[kind | None, option(metavar, text, *names, rich_help_panel=panel, **more)]


_OPTIONS: Final[dict[str, Any]] = {
    "module": _option(
        JOB, str, "--module", "NAME", "Run this module as `python -m` does, in place of a script.", also=("-m",)
    ),
    "name": _option(JOB, str, "--name", "NAME", "Name the job.", show_default="the script's"),
    "workers": _option(JOB, str, "--workers", "N|MIN:MAX", "Train on N devices, or on MIN to MAX as they are free."),
    "standby": _option(JOB, int, "--standby", "N", "Keep N free devices to take the places of lost ones."),
    "seed": _option(
        JOB, int, "--seed", "N", "Seed weights, order of samples and dropout; 0 leaves the seed to the script."
    ),
    "max_restarts": _option(
        JOB, int, "--max-restarts", "N", "Start the script again after it fails, at most N times in a row."
    ),
    "env": _option(JOB, list[str], "--env", "K=V", "Set an environment variable of the workers; repeatable."),
    "secrets": _option(
        JOB, list[str], "--secret", "NAME", "Give the workers a variable of yours that nobody is shown; repeatable."
    ),
    "workdir": _option(
        JOB, str, "--workdir", "DIR", "Send this whole folder to the nodes.", show_default="*.py in the script's folder"
    ),
    "requirements": _option(
        JOB,
        str,
        "--requirements",
        "FILE",
        "Install the packages that this file lists, as pip takes it, for the workers.",
    ),
    "split": _option(ADAPT, str, "--split", "RULE", "Split the batch by this rule: auto, inverse-time or even."),
    "adapt.batch": _option(
        ADAPT, str, "--adapt-batch", "MIN:MAX", "Let the controller choose the total batch in this range."
    ),
    "checkpoint.every_steps": _option(
        CHECKPOINT, int, "--checkpoint-every", "STEPS", "Save every STEPS steps; 0 saves only at the end."
    ),
    "checkpoint.directory": _option(
        CHECKPOINT,
        str,
        "--checkpoint-dir",
        "DIR|URL",
        "Save to this absolute path on the nodes, or to an object store.",
        show_default="the agent's folder",
    ),
    "checkpoint.keep": _option(CHECKPOINT, int, "--keep", "N", "Keep the newest N complete checkpoints."),
    "checkpoint.keep_every_steps": _option(
        CHECKPOINT,
        int,
        "--keep-every",
        "STEPS",
        "Keep the first checkpoint at or after each multiple of STEPS for good; 0 keeps none.",
    ),
}
"""Options by field of the job file; `checkpoint.keep` is field `keep` of its section."""


def given(context: typer.Context) -> dict[str, Any]:
    """Return the values of the command's made options, by the field that each sets, without those left out."""
    return dict(context.meta.get(_KEPT, {}))


def _of_job(chosen: str, workers: str = "") -> Iterator[MadeOption]:
    """Yield the options of a job. Those of strategies other than the chosen one are hidden: they say whose they are.

    workers: the default to show, if it is not the job file's."""
    from atoll.jobs.job_spec import Checkpoint, JobSpec
    from atoll.strategies import registry

    names = list(registry.names())
    how = f"Exchange gradients by this strategy: {', '.join(names)}. With auto the controller chooses one, and changes "
    how += "it while the job trains. `--strategy NAME --help` shows its settings."
    strategy = _option(STRATEGY, str, "--strategy", "NAME", how, autocompletion=lambda: names)
    fields = {f"checkpoint.{name}": field for name, field in Checkpoint.model_fields.items()} | JobSpec.model_fields
    fields["workers"] = fields["max_workers"]
    defaults = {name: field.default for name, field in fields.items() if field.default not in ("", (), {}, ...)}
    defaults |= {"workers": workers} if workers else {}
    for name, kind in {**_OPTIONS, "strategy": strategy}.items():
        yield name, kind, defaults.get(name)
    for each in sorted(registry.strategies().values(), key=lambda each: each.name != chosen):
        shown = each.name == chosen
        yield from _of_settings(each, each.settings.model_fields, "settings.", STRATEGY, shown=shown)
        for name in each.plan_parameters.adjustable():
            text = f"Let the controller change --{name} while the job trains."
            by_itself = f"on, unless --{name} is given" if name in each.plan_parameters.FOLLOWS else False
            flag = typer.Option(
                f"--adapt-{name}", help=text, hidden=not shown, show_default=by_itself, rich_help_panel=ADAPT
            )
            yield f"adapt.{name}", Annotated[bool | None, flag], None


def _adjusted(chosen: str) -> Iterator[MadeOption]:
    """Yield the settings that a running job may change: those of the chosen strategy, or of all, each in its panel."""
    from atoll.strategies import registry

    for each in registry.strategies().values():
        names, shown = each.plan_parameters.adjustable(), chosen in ("", each.name)
        yield from _of_settings(each, names, "", f"Strategy {each.name}", shown=shown)


def _of_settings(
    strategy: Strategy, names: Iterable[str], prefix: str, panel: str, *, shown: bool
) -> Iterator[MadeOption]:
    """Yield options of a strategy's settings, each with its field behind `prefix`."""
    from atoll.strategies.manual import meanings

    texts = meanings(strategy.settings) if shown else {}
    for name in names:
        field = strategy.settings.model_fields[name]
        kind = _plain(field.annotation) if shown else str  # else job file or controller know the strategy
        default = str(field.default).lower() if kind is bool else field.default
        value = option(
            {int: "N", float: "NUMBER", bool: "true|false"}.get(kind, "WORD"),
            _text(texts.get(name, ""), field.annotation),
            f"--{name.replace('_', '-')}",
            hidden=not shown,
            parser=_value if kind in (bool, str) else None,
            rich_help_panel=panel,
        )
        yield f"{prefix}{name}", Annotated[(str if kind is bool else kind) | None, value], default if shown else None


def _text(meaning: str, annotation: Any) -> str:
    """Return a setting's meaning with those of its words that the meaning does not list."""
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    unsaid = any(f"`{word}`" not in meaning for word in words)
    return f"{meaning} One of {', '.join(words)}." if unsaid else meaning


def _value(text: str) -> bool | float | str:
    """Return what a job file would hold: a number, true or false, or else the text."""
    for kind in (int, float, {"true": True, "false": False}.__getitem__):
        with suppress(ValueError, KeyError):
            return kind(text)
    return text


def _plain(annotation: Any) -> Any:
    """Return a field's type as the command line reads it: float for `float | None`, str for words."""
    while not isinstance(annotation, type) and get_args(annotation):
        annotation = get_args(annotation)[0]
    return str if isinstance(annotation, str) else annotation


def _made(listed: Iterable[MadeOption], *, defaults: bool) -> list[Any]:
    """Make click's options; of those that set the same field the first counts. defaults: show them."""

    def holder() -> None: ...

    found: dict[str, MadeOption] = {}
    for made in listed:
        found.setdefault(re.sub(r"[-.]", "_", made[0]), made)
    holder.__annotations__ = {name: kind for name, (_, kind, _) in found.items()}
    holder.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (_, kind, default) in found.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(holder)
    params: list[Any] = typer.main.get_command(app).params
    for param, (field, _, _) in zip(params, found.values(), strict=True):
        param.expose_value, param.callback = False, _keeper(field)
        param.show_default = defaults and param.show_default
    return tidy(params)


def _keeper(field: str) -> Callable[[Any, Any, Any], None]:
    def keep(context: Any, param: Any, value: Any) -> None:
        if value is not None and context.get_parameter_source(param.name).name == "COMMANDLINE":
            context.meta.setdefault(_KEPT, {})[field] = value

    return keep


def _command_with(listed: Callable[[str], Iterable[MadeOption]], *, defaults: bool) -> type[TyperCommand]:
    """Return a kind of command whose further options are made when it is first asked for. `listed` gets the strategy
    that the command line names, empty if none."""
    made = cache(lambda chosen: _made(listed(chosen), defaults=defaults))

    class OptionsCommand(TidyCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.meta[_CHOSEN] = _chosen(args)
            parsed: list[str] = super().parse_args(ctx, args)
            return parsed

        def get_params(self, ctx: Any) -> list[Any]:
            *own, asking_for_help = super().get_params(ctx)
            params = [*own, *made(ctx.meta.get(_CHOSEN, ""))]
            if any(param.rich_help_panel in PANELS for param in params):
                asking_for_help.rich_help_panel = OUTPUT
            panels = {panel: place for place, panel in enumerate(PANELS)}
            return sorted([*params, asking_for_help], key=lambda param: panels.get(param.rich_help_panel, -1))

    return OptionsCommand


def _chosen(args: Iterable[str]) -> str:
    """Return the strategy that the words before `--` name; empty if none."""
    chosen = ""
    words = takewhile(lambda word: word != "--", args)
    for word in words:
        option, _, value = word.partition("=")
        if option == "--strategy":
            chosen = value or next(words, "")
    return chosen


AdjustCommand: Final = _command_with(_adjusted, defaults=False)
"""`atoll adjust`, with the settings that a running job may change."""

JobCommand: Final = _command_with(_of_job, defaults=True)
"""`atoll submit`, with the options of the job and of its strategy."""

RunCommand: Final = _command_with(partial(_of_job, workers="1 to all devices"), defaults=True)
"""`atoll run`, which trains on all devices if it is not told otherwise."""

RestoreCommand: Final = _command_with(_of_job, defaults=False)
"""`atoll restore`, whose options are by default those of the job before."""


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
