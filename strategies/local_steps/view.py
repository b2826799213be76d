"""Line of `atoll status` about strategy `local-steps`."""

from __future__ import annotations

from atoll.strategies.declaration import Shown
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import LocalSteps
from atoll.strategies.shared_params.measures import drift_of


def status(shown: Shown) -> list[str]:
    """Return '20.0 % sent every 10 steps, int2, up to 3 steps late', 'stall 3.1 % of the step', 'drift 8.3 steps'."""
    assert isinstance(shown.settings, LocalSteps)
    pace = shown.planned.over_settings(shown.settings) if isinstance(shown.planned, LocalStepsPlan) else shown.settings
    turn = f" every {pace.every} steps" if pace.every > 1 else ""
    late = f", up to {pace.staleness} steps late" if pace.staleness > 1 else ""
    at = ", gradients at the shared parameters" if pace.gradients == "shared_params" else ""
    said = [f"{pace.density * 100:.1f} % sent{turn}, {pace.values}{late}{at}"]
    if shown.metrics:
        said.append(f"stall {shown.metrics.get('stall_share', 0.0) * 100:.1f} % of the step")
        said += drift_of(shown)
    return said
