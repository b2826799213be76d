"""Words a completed change of membership, and a launch, for `atoll events`. Pure.

atoll/cli/traces/sentences.py reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.controller.jobs.membership.observed_views import WayIn
from atoll.controller.state.views import ViewRecord


def completed_sentence(view: ViewRecord, ways: Sequence[WayIn]) -> str:
    """Of a view that came to its first step: 'view 2: went on in place after 0.84 s: 0.05 noticed, 0.12 aborted, ...'.

    ways: of its members. Each part is that of the member that took longest, and all add up to what training waited."""
    slowest = max(ways, key=lambda way: way.first_step_s)
    noticed_s = 0.0
    if view.seen_unix_s and view.lost:  # before the worker's own clock began: the view came told_s after that
        noticed_s = max(view.proposed_unix_s - view.seen_unix_s - slowest.told_s, 0.0)
    stood_s = max(slowest.aborted_s, slowest.told_s)
    parts = [
        (noticed_s, "noticed"),
        (slowest.aborted_s, "aborted"),
        (stood_s - slowest.aborted_s, "told"),
        (slowest.met_s - stood_s, "formed"),
        (slowest.agreed_s - slowest.met_s, "agreed"),
        (slowest.first_step_s - slowest.agreed_s, "first step"),
    ]
    total_s = noticed_s + slowest.first_step_s
    shown = ", ".join(f"{max(seconds, 0.0):.2f} {what}" for seconds, what in parts)
    count = len(view.ranks)
    who = "1 worker, alone," if count == 1 else f"{count} workers"
    changed = "".join(
        f"; {', '.join(names[:8])} {what}" for names, what in ((view.lost, "lost"), (view.joined, "joined")) if names
    )
    how = "paused for" if view.at_boundary else "went on in place after"
    return f"view {view.view}: {who} {how} {total_s:.2f} s from step {view.step}: {shown}{changed}"


def first_step_sentence(view: ViewRecord) -> str:
    """Of a launch's view: 'view 1: 3 workers completed their first step 4.1 s after the launch'."""
    who = f"{len(view.ranks)} workers completed their" if len(view.ranks) > 1 else "1 worker completed its"
    return f"view {view.view}: {who} first step {view.stepped_unix_s - view.proposed_unix_s:.1f} s after the launch"
