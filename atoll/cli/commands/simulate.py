"""atoll simulate: a cluster in simulated time, under the planners of the real one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
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
        list[str] | None, typer.Option(help="Policy to simulate; may be repeated. Default: those of the scenario.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all noise. Default: the scenario's.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw progress, step, batch, parameters.")
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="Devices, models, clusters, policies.")] = False,
    as_json: Json = False,
) -> None:
    """Simulate a cluster: compare policies for batches and compression, for checkpoints, or for volunteers.

    The same scenario and seed give the same output, to the byte.
    """
    if list_presets:
        _list_presets(as_json)
        return
    if scenario is None:
        raise BadInput("which scenario? Give a TOML file, e.g. examples/scenarios/cannikin-a.toml, or --list-presets")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--plot needs matplotlib: pip install 'atoll[examples]'")
    scenarios = need("atoll.controller.simulator.scenario", "controller")
    from atoll.controller.simulator import failures, report, volunteers
    from atoll.controller.simulator.failure_scenario import FailureScenario
    from atoll.controller.simulator.volunteer_scenario import VolunteerScenario

    kinds = {"failures": (failures, FailureScenario), "volunteers": (volunteers, VolunteerScenario)}
    document = scenarios.read(scenario)
    of_kind, schema = kinds.get(document.get("kind", ""), (None, scenarios.Scenario))
    if of_kind is not None and plot is not None:
        raise BadInput(f"--plot draws scenarios of devices; of {document['kind']} there is a table, and --json")
    read = scenarios.check(schema, document, str(scenario))
    policies, chosen = policy or read.policies, read.seed if seed is None else seed
    shown: Any = of_kind or report
    outcomes = list(of_kind.simulate(read, policies, chosen) if of_kind else _steps(read, scenario, policies, chosen))
    if as_json:
        plain = [shown.plain(outcome) for outcome in outcomes]
        terminal.print_json({"scenario": read.name, "seed": chosen, "policies": plain})
    else:
        terminal.print_table(shown.COLUMNS, shown.rows(outcomes), right=shown.COLUMNS[1:])
    if plot is not None:
        try:
            report.draw(read.name, outcomes, plot)
        except (OSError, ValueError) as error:  # matplotlib raises ValueError for an ending it cannot write
            raise BadInput(f"--plot {plot} cannot be written: {error}") from error


def _steps(read: Any, path: Path, policies: list[str], seed: int) -> Iterator[Any]:
    """Simulate the steps of a scenario of devices, with a note for each policy that is done."""
    from atoll.controller.simulator.cluster import build
    from atoll.controller.simulator.run import simulate

    for outcome in simulate(build(read, path.parent), policies, seed):
        terminal.note(f"{outcome.policy}: {outcome.steps} steps simulated")
        yield outcome


def _list_presets(as_json: bool) -> None:
    presets = need("atoll.controller.simulator.presets", "controller")
    from atoll.controller.simulator.policies import POLICIES, of_strategy
    from atoll.strategies.registry import strategies

    own = {name: made for each in strategies().values() for name, made in of_strategy(each).items()}
    found = presets.listed() + [
        {"kind": "policy", "name": name, "what": policy.what} for name, policy in (POLICIES | own).items()
    ]
    if as_json:
        terminal.print_json({"presets": found})
    else:
        terminal.print_table(("KIND", "NAME", "WHAT"), [(row["kind"], row["name"], row["what"]) for row in found])
