"""Options with a name for their value, and commands whose help shows no other type."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def option(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option that takes a value. metavar: what to give; text: a sentence for the help."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def _no_type(ctx: Any) -> None:
    """Return the type beside a flag or an argument, of which the name says enough."""


def tidy(params: list[Any]) -> list[Any]:
    """Return the parameters without types beside flags and arguments."""
    for param in params:
        if param.param_type_name == "argument" or param.is_flag:
            param.display_type_rich = _no_type
    return params


class TidyCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters in the order of the help."""
        return tidy(super().get_params(ctx))


class TidyGroup(TyperGroup):
    """A command that has commands. Alone it shows its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the command."""
        if not (args or self.invoke_without_command or ctx.resilient_parsing):
            typer.echo(ctx.get_help(), nl=False)
            ctx.exit()
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters in the order of the help."""
        return tidy(super().get_params(ctx))
