"""atoll plan: any planner, offline."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from atoll.cli.commands.daemons import need
from atoll.cli.commands.jobs import Json
from atoll.cli.render import terminal
from atoll.errors import BadInput
from atoll.host.documents import did_you_mean

_MAX_INPUT_BYTES: Final = 64 * 1024 * 1024


def plan(
    name: Annotated[str | None, typer.Argument(help="Which planner; all are listed where left out.")] = None,
    as_json: Json = False,
) -> None:
    """Run a planner by hand: JSON on stdin, its plan as JSON on stdout.

    atoll plan inverse-time < recorded.json
    """
    planners = need("atoll.controller.planners.registry", "controller").PLANNERS

    if name is None:
        listed = [(key, _summary(planners[key])) for key in sorted(planners)]
        if as_json:
            terminal.print_json({"planners": [{"name": key, "summary": summary} for key, summary in listed]})
        else:
            terminal.print_table(("PLANNER", "WHAT"), listed)
        return
    if name not in planners:
        raise BadInput(f"no planner {name!r}. {did_you_mean(name, sorted(planners))}")
    if sys.stdin.isatty():
        terminal.note(f"reading the input of {name} as JSON from the terminal; end it with Ctrl-D")
    content = sys.stdin.buffer.read(_MAX_INPUT_BYTES + 1)
    if len(content) > _MAX_INPUT_BYTES:
        raise BadInput(f"the input of {name} is larger than {_MAX_INPUT_BYTES >> 20} MiB. Give fewer candidates")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"the input of {name} is not UTF-8 at byte {error.start}. Give JSON in UTF-8") from error
    print(planners[name].run_json(text))


def _summary(planner: object) -> str:
    text = getattr(planner, "summary", None) or planner.__doc__ or ""
    return str(text).strip().partition("\n")[0]
