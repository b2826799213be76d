"""The line of `atoll status` about strategy `local-steps`."""

from __future__ import annotations

from atoll.strategies.declaration import Shown
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps
from atoll.strategies.shared_masters.metrics import drift_of


def status(shown: Shown) -> list[str]:
    """'20.0 % sent every 10 steps, int2', 'stall 3.1 % of the step', 'drift 8.3 steps'."""
    assert isinstance(shown.settings, LocalSteps)
    turn = f" every {shown.settings.every} steps" if shown.settings.every > 1 else ""
    planned = shown.planned.density if isinstance(shown.planned, LocalStepsPlan) else None
    density = shown.settings.density if planned is None else planned
    said = [f"{density * 100:.1f} % sent{turn}, {shown.settings.values}"]
    if shown.metrics:
        said.append(f"stall {shown.metrics.get('stall_share', 0.0) * 100:.1f} % of the step")
        said += drift_of(shown)
    return said
