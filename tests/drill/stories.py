"""Evidence of jobs that never ran: what each rank would have written."""

from __future__ import annotations

from collections.abc import Iterable

from drill.evidence import Begun, Evidence, Incarnation

RANKS = 2
SAMPLES = 12
EPOCH_STEPS = 3
"""Of 4 samples each, 2 a rank."""


def begun(run: int, rank: int, step: int, *, weights: str = "", at_s: float | None = None) -> Begun:
    """As a job writes it to which nothing happens. Steps take a second."""
    epoch, place = divmod(step, EPOCH_STEPS)
    first = 4 * place + 2 * rank
    return Begun(
        Incarnation(run), rank, step, epoch, (first, first + 1), weights or f"w{step}", step if at_s is None else at_s
    )


def trained(run: int, steps: Iterable[int], *, later_s: float = 0.0) -> list[Begun]:
    return [begun(run, rank, step, at_s=step + later_s) for step in steps for rank in range(RANKS)]


def evidence(*parts: Iterable[Begun], final: int = 6) -> Evidence:
    return Evidence(tuple(one for part in parts for one in part), dict.fromkeys(range(RANKS), f"w{final}"))


CALM = evidence(trained(1, range(6)))
