"""Simulates Cases 1 to 4 of the volunteer pipelines: minutes a batch by the rules of DAPPLE, SWARM and `volunteer`.

    python benchmarks/volunteer_cases.py [--models albert llama] [--cases 1 2 3 4] [--seeds 1 2 3] [--batches 30]

Of the paper (ICLR 2025 submission, Table 2): 512 samples of 512 tokens in 128 micro-batches. 1: sixteen
V100 in one place. 2: four sites of four, 1 to 3 GB/s and 10 to 100 ms between them. 3: two sites of four V100, and
eight RTX 2080 at home, 50 to 300 Mbit/s and 100 to 150 ms. 4: the same, and each volunteer is lost in a batch with a
probability of 90 %. As many stages as planner `allocation` finds, and one for each site that stays. It is simulated
time: another machine or load gives the same figures. Medians of the seeds [least to most]."""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Final

from lab.volunteer_pipelines import simulate
from lab.volunteer_scenario import VolunteerScenario

from atoll.controller.simulator.scenario import check

ALONE_S: Final = {"albert": 44 * 60, "llama": 169 * 60}
"""In which sixteen V100 that wait for nothing make a batch: what the paper has for Case 1."""
MODELS: Final[dict[str, dict[str, Any]]] = {
    "albert": {"layers": 12, "activation_bytes": 512 * 4096 * 4, "parameter_bytes": 940_000_000},
    "llama": {"layers": 60, "activation_bytes": 512 * 6656 * 4, "parameter_bytes": 66_000_000_000},
}
V100: Final = {"name": "hpc", "mbit_s": 16_000}
AT_HOME: Final = [
    {**V100, "count": 2, "devices": 4},
    {"name": "home", "count": 8, "power": 0.645, "reliable": False},  # an RTX 2080 takes 55 % longer
]
FAR: Final = {"mbit_s": [50, 300], "delay_s": [0.1, 0.15]}
CASES: Final[dict[int, dict[str, Any]]] = {
    1: {"sites": [{**V100, "devices": 16}]},
    2: {
        "sites": [{**V100, "count": 4, "devices": 4}],
        "between": {"mbit_s": [8_000, 24_000], "delay_s": [0.01, 0.1]},
    },
    3: {"sites": AT_HOME, "between": FAR},
    4: {"sites": AT_HOME, "between": FAR, "disconnect": 0.9},
}
POLICIES: Final = ("dapple", "swarm", "volunteer", "alone")


def minutes(model: str, case: int, stages: int | None, seed: int, batches: int) -> tuple[int, dict[str, float]]:
    """(stages, by policy the mean of the batches)."""
    document = {
        "kind": "volunteers",
        "batch": 512,
        "micro_batches": 128,
        "batches": batches,
        "layer_cost": ALONE_S[model] * 16 / 512 / MODELS[model]["layers"],
        **MODELS[model],
        **CASES[case],
        **({"max_stages": stages} if stages is not None else {}),
    }
    scenario = check(VolunteerScenario, document, f"{model}, case {case}")
    found = {one.policy: one for one in simulate(scenario, POLICIES, seed)}
    return len(found["volunteer"].stages), {name: statistics.mean(one.batch_s) / 60 for name, one in found.items()}


def of_seeds(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cases", nargs="*", type=int, default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--batches", type=int, default=30)
    asked = parser.parse_args()
    print("model   case stages", *(f"{name:>9}" for name in POLICIES), "  dapple / volunteer   swarm / volunteer")
    for model in asked.models:
        for case in asked.cases:
            sites = sum(one.get("count", 1) for one in CASES[case]["sites"] if one.get("reliable", True))
            for most in (None, sites):
                runs = [minutes(model, case, most, seed, asked.batches) for seed in asked.seeds]
                means = [found for _, found in runs]
                shown = [f"{statistics.median(one[name] for one in means):9.0f}" for name in POLICIES]
                ratios = [of_seeds([one[name] / one["volunteer"] for one in means], 2) for name in POLICIES[:2]]
                print(f"{model:8}{case:4}{runs[0][0]:7}", *shown, *(f"{one:>20}" for one in ratios), flush=True)


if __name__ == "__main__":
    main()
