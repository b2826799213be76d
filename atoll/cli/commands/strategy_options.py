"""Options made from declarations: those of each strategy's settings and plan parameters come from the registry.

A command makes them when it is first asked for, so that other commands need not load the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, get_args

import typer
import typer.main
from typer.core import TyperCommand

if TYPE_CHECKING:
    from atoll.strategies.declaration import Declared

_KEPT: Final = "atoll.strategy"
"""Key under which a click context keeps the values that were given, by field."""


def given(context: typer.Context) -> dict[str, Any]:
    """Return the values of the command's made options, by the field that each sets, without those left out."""
    return dict(context.meta.get(_KEPT, {}))


class OptionsCommand(TyperCommand):
    """Command whose further options are made when it is first asked for."""

    make: ClassVar[Callable[[], list[Any]]]

    def get_params(self, ctx: Any) -> list[Any]:
        *own, asking_for_help = super().get_params(ctx)
        return [*own, *type(self).make(), asking_for_help]


def submitted() -> Iterator[tuple[str, Any]]:
    """Yield the options of `--strategy` and of every strategy's settings, each with the field that it sets."""
    from atoll.strategies import registry

    names = "|".join(registry.strategies())
    yield "strategy", Annotated[str | None, typer.Option(metavar=names, help="How workers exchange gradients.")]
    for each in registry.strategies().values():
        for name, kind, flag in _flags(each.settings):
            help_text = f"{each.name}: {flag.help}"
            option = typer.Option(f"--{name}", metavar=flag.metavar, help=help_text)
            yield f"settings.{name}", Annotated[kind | None, option]
        for name in each.plan_parameters.adjustable():
            help_text = f"{each.name}: let the controller choose the {name}."
            yield f"adapt.{name}", Annotated[bool | None, typer.Option(f"--adapt-{name}", help=help_text)]


def _adjusted() -> Iterator[tuple[str, Any]]:
    from atoll.strategies import registry

    for each in registry.strategies().values():
        for name, kind, flag in _flags(each.plan_parameters):
            help_text = f"{each.name}: {flag.help}"
            option = typer.Option(f"--{name}", metavar=flag.metavar, help=help_text)
            yield name, Annotated[kind | None, option]


def _flags(model: type[Declared]) -> Iterator[tuple[str, type, Any]]:
    from atoll.strategies.declaration import Flag

    for name, field in model.model_fields.items():
        for flag in field.metadata:
            if isinstance(flag, Flag):
                yield name, _plain(field.annotation), flag


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


class AdjustCommand(OptionsCommand):
    """`atoll adjust`: the parameters that plans give a strategy."""

    make = staticmethod(cache(lambda: options(_adjusted)))
