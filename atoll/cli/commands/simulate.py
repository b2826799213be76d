"""atoll simulate: a cluster in simulated time, under the planners of the real one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.commands.daemons import need
from atoll.cli.commands.jobs import Json
from atoll.cli.render import terminal
from atoll.errors import BadInput


def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(help="A TOML file: devices, links, changes, learning; or failures, or volunteers.")
    ] = None,
    *,
    policy: Annotated[
        list[str] | None, typer.Option(help="Who decides; may be repeated. The scenario's where left out.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all noise; the scenario's where left out.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw progress, step, batch, parameters.")
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="Devices, models, clusters, policies.")] = False,
    as_json: Json = False,
) -> None:
    """Simulate a cluster and compare who decides about batches and compression, how it recovers from failures, or what
    volunteers bring.

    The same scenario and seed give the same output, to the byte.
    """
    if list_presets:
        _list_presets(as_json)
        return
    if scenario is None:
        raise BadInput("which scenario? Give a TOML file, e.g. examples/scenarios/cannikin-a.toml, or --list-presets")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--plot needs matplotlib: pip install 'atoll[examples]'")
    catalogue = need("atoll.controller.simulator.catalogue", "controller")
    from atoll.controller.simulator import cluster, report
    from atoll.controller.simulator import scenario as scenarios

    document = scenarios.read(scenario)
    of_kind = {"failures": _failures, "volunteers": _volunteers}.get(document.get("kind", ""))
    if of_kind is not None:
        if plot is not None:
            raise BadInput(f"--plot draws scenarios of devices; of {document['kind']} there is a table, and --json")
        of_kind(document, scenario, policy, seed, as_json)
        return
    read = scenarios.parse(document, str(scenario))
    chosen = read.seed if seed is None else seed
    built = cluster.build(read, scenario.parent)
    outcomes = []
    for outcome in catalogue.simulate(built, policy or read.policies, chosen):
        outcomes.append(outcome)
        terminal.note(f"{outcome.policy}: {outcome.steps} steps simulated")
    if as_json:
        terminal.print_json(report.document(read.name, chosen, outcomes))
    else:
        terminal.print_table(report.COLUMNS, report.rows(outcomes), right=report.NUMBERS)
    if plot is not None:
        from atoll.controller.simulator.plot import draw

        try:
            draw(read.name, outcomes, plot)
        except (OSError, ValueError) as error:  # matplotlib says ValueError of an ending it cannot write
            raise BadInput(f"--plot {plot} cannot be written: {error}") from error


def _failures(document: dict[str, Any], path: Path, policy: list[str] | None, seed: int | None, as_json: bool) -> None:
    from atoll.controller.simulator import failure_scenario, recovery, recovery_report

    read = failure_scenario.parse(document, str(path))
    _compare(read, recovery.survive, recovery_report, policy, seed, as_json)


def _volunteers(
    document: dict[str, Any], path: Path, policy: list[str] | None, seed: int | None, as_json: bool
) -> None:
    from atoll.controller.simulator import volunteer_scenario, volunteers, volunteers_report

    read = volunteer_scenario.parse(document, str(path))
    _compare(read, volunteers.simulate, volunteers_report, policy, seed, as_json)


def _compare(  # noqa: PLR0917 - what a kind of scenario is made of, then what was asked
    read: Any,
    simulate: Callable[..., Iterable[Any]],
    told: Any,
    policy: list[str] | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Show what each policy makes of the scenario."""
    chosen = read.seed if seed is None else seed
    outcomes = list(simulate(read, policy or read.policies, chosen))
    if as_json:
        terminal.print_json(told.document(read.name, chosen, outcomes))
    else:
        terminal.print_table(told.COLUMNS, told.rows(outcomes), right=told.NUMBERS)


def _list_presets(as_json: bool) -> None:
    presets = need("atoll.controller.simulator.presets", "controller")
    catalogue = need("atoll.controller.simulator.catalogue", "controller")
    from atoll.strategies.registry import strategies

    own = {name: made for each in strategies().values() for name, made in catalogue.of_strategy(each).items()}
    policies = catalogue.POLICIES | own
    found = presets.listed() + [{"kind": "policy", "name": name, "what": what} for name, (_, what) in policies.items()]
    if as_json:
        terminal.print_json({"presets": found})
    else:
        terminal.print_table(("KIND", "NAME", "WHAT"), [(row["kind"], row["name"], row["what"]) for row in found])
