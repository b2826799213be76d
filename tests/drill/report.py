"""A drill's outcome as tables and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from drill.conduct import DrillOutcome
from drill.figures import Distribution, StrikeCost
from drill.schedule import Strike

COLUMNS: Final = ("STRIKE", "COUNT", "NOTICED AFTER", "TRAINING AFTER", "STEPS LOST", "ENDED A RUN")


def rows(recoveries: Sequence[StrikeCost]) -> list[list[str]]:
    """One for each kind of strike that came. Times are median / p90 / most, in seconds; steps are median / most."""
    found = []
    for strike in Strike:
        own = [one for one in recoveries if one.hit.strike is strike]
        if own:
            lost = _of_lost(own)
            found.append(
                [
                    str(strike),
                    str(len(own)),
                    _times(_of_detection(own)),
                    _times(_of_training(own)),
                    f"{lost.median:g} / {lost.most:g}" if lost else "-",
                    str(sum(one.interrupted for one in own)),
                ]
            )
    return found


def verdict_rows(outcome: DrillOutcome) -> list[list[str]]:
    return [[one.name, "PASS" if one.holds else "FAIL", one.evidence] for one in outcome.verdicts]


def summary(outcome: DrillOutcome) -> str:
    """The line between the two tables."""
    count = len(outcome.recoveries)
    return (
        f"{count} strikes in {outcome.length_s / 60:.1f} minutes; effective training ratio {100 * outcome.ratio:.1f} % "
        f"(steps of {1e3 * outcome.step_s:.0f} ms)"
    )


def document(outcome: DrillOutcome) -> dict[str, Any]:
    """All of it, each strike with its own times; wall clock in seconds since 1970."""
    return {
        "holds": outcome.holds,
        "length_s": outcome.length_s,
        "effective_ratio": outcome.ratio,
        "step_s": outcome.step_s,
        "invariants": [{"name": v.name, "holds": v.holds, "evidence": v.evidence} for v in outcome.verdicts],
        "strikes": [
            {
                "strike": str(one.hit.strike),
                "at_unix_s": one.hit.at_s,
                "victims": list(one.hit.victims),
                "detection_s": one.detection_s,
                "training_s": one.training_s,
                "steps_lost": one.steps_lost,
                "ended_a_run": one.interrupted,
            }
            for one in outcome.recoveries
        ],
        "missed": [{"strike": str(one.strike), "at_s": one.at_s} for one in outcome.missed],
    }


def print_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for the documentation."""
    print(markdown(columns, rows))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for the documentation."""
    lines = [[column.lower() for column in columns], ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of_detection(own: Sequence[StrikeCost]) -> Distribution | None:
    return Distribution.of(one.detection_s for one in own if one.detection_s is not None)


def _of_training(own: Sequence[StrikeCost]) -> Distribution | None:
    return Distribution.of(one.training_s for one in own if one.training_s is not None)


def _of_lost(own: Sequence[StrikeCost]) -> Distribution | None:
    return Distribution.of(one.steps_lost for one in own)


def _times(found: Distribution | None) -> str:
    return f"{found.median:.2f} / {found.p90:.2f} / {found.most:.2f}" if found else "-"
