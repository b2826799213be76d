"""atoll simulate: a cluster in simulated time, under the planners of the real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.commands.daemons import need
from atoll.cli.commands.jobs import Json
from atoll.cli.render import terminal
from atoll.errors import BadInput


def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(help="A TOML file: devices, links, changes, learning; or failures.")
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
    """Simulate a cluster and compare who decides about batches and compression, or how it recovers from failures.

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
    if document.get("kind") == "failures":
        if plot is not None:
            raise BadInput("--plot draws scenarios of devices; of failures there is a table, and --json")
        _failures(document, scenario, policy, seed, as_json)
        return
    read = scenarios.parse(document, str(scenario))
    for line in scenarios.retired(document | ({"policies": policy} if policy else {})):
        terminal.note(line)
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
    chosen = read.seed if seed is None else seed
    outcomes = list(recovery.survive(read, policy or read.policies, chosen))
    if as_json:
        terminal.print_json(recovery_report.document(read.name, chosen, outcomes))
    else:
        terminal.print_table(recovery_report.COLUMNS, recovery_report.rows(outcomes), right=recovery_report.NUMBERS)


def _list_presets(as_json: bool) -> None:
    presets = need("atoll.controller.simulator.presets", "controller")
    policies = need("atoll.controller.simulator.catalogue", "controller").POLICIES
    found = presets.listed() + [{"kind": "policy", "name": name, "what": what} for name, (_, what) in policies.items()]
    if as_json:
        terminal.print_json({"presets": found})
    else:
        terminal.print_table(("KIND", "NAME", "WHAT"), [(row["kind"], row["name"], row["what"]) for row in found])
