"""Simulates what failures leave of the training time, and what volunteers bring to a pipeline.

    python benchmarks/disruptions.py [benchmarks/scenarios/failures.toml ...] [--policy memory] [--seed 7]

Each file is a scenario of `kind = "failures"` or `kind = "volunteers"` and gives one table; all of benchmarks/scenarios
where none is named. Time is simulated: the same file and seed give the same figures on every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from lab import failures, volunteer_pipelines
from lab.failure_scenario import FailureScenario
from lab.volunteer_scenario import VolunteerScenario

from atoll.cli.render.terminal import aligned
from atoll.controller.simulator.scenario import check, read
from atoll.errors import BadInput

SCENARIOS: Final = sorted((Path(__file__).resolve().parent / "scenarios").glob("*.toml"))
KINDS: Final[dict[str, tuple[Any, Any]]] = {
    "failures": (failures, FailureScenario),
    "volunteers": (volunteer_pipelines, VolunteerScenario),
}


def table(path: Path, policies: list[str] | None = None, seed: int | None = None) -> str:
    """Return the outcomes of a scenario file as lines. Raises BadInput."""
    document = read(path)
    if document.get("kind") not in KINDS:
        raise BadInput(f"scenario {path}: kind = {document.get('kind')!r} is wrong. Use one of {', '.join(KINDS)}")
    of_kind, schema = KINDS[document["kind"]]
    scenario = check(schema, document, str(path))
    outcomes = list(of_kind.simulate(scenario, policies or scenario.policies, scenario.seed if seed is None else seed))
    name, *numbers = of_kind.COLUMNS
    return "\n".join(aligned([name, *(f">{each}" for each in numbers)], of_kind.rows(outcomes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", type=Path, default=SCENARIOS)
    parser.add_argument("--policy", action="append", help="May be repeated. Default: those of the scenario.")
    parser.add_argument("--seed", type=int, help="Default: the scenario's.")
    given = parser.parse_args()
    for path in given.scenarios:
        print(table(path, given.policy, given.seed), flush=True)


if __name__ == "__main__":
    main()
