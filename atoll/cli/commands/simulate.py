"""atoll decide, simulate: the planners offline, by hand or in a simulated cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.cli.commands.daemons import need
from atoll.cli.commands.options import Json
from atoll.cli.render import terminal
from atoll.cli.render.help import option
from atoll.errors import BadInput
from atoll.host.documents import did_you_mean

_MAX_INPUT_BYTES: Final = 64 * 1024 * 1024


def decide(
    name: Annotated[
        str | None, typer.Argument(metavar="PLANNER", help="Planner to run. Without one, the command lists all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a planner by hand: JSON on stdin, its decision as JSON on stdout.

    atoll decide inverse-time < recorded.json
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


def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO", help="TOML file with devices, links, changes and learning.")
    ] = None,
    *,
    policy: Annotated[
        list[str] | None, option("NAME", "Simulate this policy; repeatable.", show_default="those of the scenario")
    ] = None,
    seed: Annotated[
        int | None, option("N", "Seed all noise with this number.", min=0, show_default="the scenario's")
    ] = None,
    list_presets: Annotated[
        bool,
        typer.Option("--list-presets", help="List the devices, models, clusters and policies that scenarios may name."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate a cluster to compare policies for batches and compression.

    The same scenario and seed give the same output, to the byte.
    """
    if list_presets:
        _list_presets(as_json)
        return
    if scenario is None:
        raise BadInput("which scenario? Give a TOML file, e.g. examples/scenarios/cannikin-a.toml, or --list-presets")
    scenarios = need("atoll.controller.simulator.scenario", "controller")
    from atoll.controller.simulator import report, run
    from atoll.controller.simulator.cluster import build

    read = scenarios.check(scenarios.Scenario, scenarios.read(scenario), str(scenario))
    chosen = read.seed if seed is None else seed
    outcomes = []
    for outcome in run.simulate(build(read, scenario.parent), policy or read.policies, chosen):
        terminal.note(f"{outcome.policy}: {outcome.steps} steps simulated")
        outcomes.append(outcome)
    if as_json:
        plain = [report.plain(outcome) for outcome in outcomes]
        terminal.print_json({"scenario": read.name, "seed": chosen, "policies": plain})
    else:
        terminal.print_table(report.COLUMNS, report.rows(outcomes))


def _list_presets(as_json: bool) -> None:
    presets = need("atoll.controller.simulator.presets", "controller")
    from atoll.controller.simulator.policies import POLICIES, of_strategy
    from atoll.strategies.registry import strategies

    own = {name: made for each in strategies().values() for name, made in of_strategy(each).items()}
    found = presets.listed() + [("policy", name, policy.what) for name, policy in (POLICIES | own).items()]
    if as_json:
        terminal.print_json({"presets": [{"kind": kind, "name": name, "what": what} for kind, name, what in found]})
    else:
        terminal.print_table(("KIND", "NAME", "WHAT"), found)
