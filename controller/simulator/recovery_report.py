"""Reports what came of failures, for people and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from atoll.controller.simulator.recovery import Survived

COLUMNS: Final = ("POLICY", "EFFECTIVE", "STEPS", "FAILURES", "LOCAL/PEERS/STORED", "PAUSE", "WASTED", "EQ. 6.1")
NUMBERS: Final = COLUMNS[1:]


def rows(outcomes: Sequence[Survived]) -> list[list[str]]:
    """EFFECTIVE: time of the steps that were kept, of all time. LOCAL/PEERS/STORED: recoveries by what they restored
    from. PAUSE: mean, from failure to training. WASTED: mean, work lost and retrieving; EQ. 6.1 says how much."""
    return [_row(outcome) for outcome in outcomes]


def _row(outcome: Survived) -> list[str]:
    tiers = outcome.tiers()
    return [
        outcome.policy,
        f"{100 * outcome.effective:.2f} %",
        str(outcome.steps),
        str(outcome.failures),
        f"{tiers['local']}/{tiers['peers']}/{tiers['persistent']}",
        _seconds(mean([recovery.pause_s for recovery in outcome.recoveries])),
        _seconds(mean([recovery.wasted_s for recovery in outcome.recoveries])),
        _seconds(outcome.expected_wasted_s),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def document(scenario: str, seed: int, outcomes: Sequence[Survived]) -> dict[str, Any]:
    """Plain data: the same for the same scenario and seed, to the byte."""
    return {"scenario": scenario, "seed": seed, "policies": [_plain(outcome) for outcome in outcomes]}


def _plain(outcome: Survived) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "effective": outcome.effective,
        "failures": outcome.failures,
        "expected_wasted_s": outcome.expected_wasted_s,
        "recoveries": {
            tier: {
                "count": count,
                "mean_wasted_s": mean([r.wasted_s for r in outcome.recoveries if r.tier == tier]),
                "mean_pause_s": mean([r.pause_s for r in outcome.recoveries if r.tier == tier]),
            }
            for tier, count in sorted(outcome.tiers().items())
        },
    }
