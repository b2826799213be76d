"""Makes the events of a view that came to its first step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.controller.jobs.model.observed_views import WayIn
from atoll.controller.state.events import EventKind, NewEvent, TimedPart
from atoll.controller.state.records import Level
from atoll.controller.state.views import ViewRecord


def changed_event(view: ViewRecord, ways: Sequence[WayIn], level: Level) -> NewEvent:
    """Return the event of a change of members, with the parts of the pause.

    ways: of the members. The parts are those of the member that took longest; they add up to the pause of training."""
    slowest = max(ways, key=lambda way: way.first_step_s)
    noticed_s = 0.0
    if view.seen_unix_s and view.lost:  # before the worker's own clock began: the view came told_s after that
        noticed_s = max(view.proposed_unix_s - view.seen_unix_s - slowest.told_s, 0.0)
    stood_s = max(slowest.aborted_s, slowest.told_s)
    parts = (
        ("noticed", noticed_s),
        ("aborted", slowest.aborted_s),
        ("told", stood_s - slowest.aborted_s),
        ("formed", slowest.met_s - stood_s),
        ("agreed", slowest.agreed_s - slowest.met_s),
        ("first step", slowest.first_step_s - slowest.agreed_s),
    )
    return NewEvent(
        kind=EventKind.CHANGED_AT_BOUNDARY if view.at_boundary else EventKind.CHANGED_IN_PLACE,
        level=level,
        view=view.view,
        step=view.step,
        workers=len(view.ranks),
        lost=view.lost,
        joined=view.joined,
        total_s=noticed_s + slowest.first_step_s,
        parts=tuple(TimedPart(name, max(seconds, 0.0)) for name, seconds in parts),
    )


def first_step_event(view: ViewRecord) -> NewEvent:
    """Return the event of a launch's view, whose workers have all completed a step."""
    waited_s = view.stepped_unix_s - view.proposed_unix_s
    return NewEvent(kind=EventKind.FIRST_STEP, view=view.view, workers=len(view.ranks), total_s=waited_s)
