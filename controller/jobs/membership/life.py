"""The states of a view, every legal transition between them with its cause, and the events of its first step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.model.observed import WayIn
from atoll.controller.state.events import EventKind, NewEvent, TimedPart
from atoll.controller.state.records import Level
from atoll.controller.state.views import ViewRecord, ViewState
from atoll.errors import AtollError

# Every legal edge, and what causes it. An edge that is missing here is a bug, not a race to tolerate.
VIEW_EDGES: Final[Mapping[tuple[ViewState, ViewState], str]] = {
    (ViewState.PROPOSED, ViewState.FORMING): "every member said that it has left all older views for it",
    (ViewState.PROPOSED, ViewState.ABANDONED): "a newer view was proposed, or the run is stopped",
    (ViewState.FORMING, ViewState.IN_FORCE): "every member said that it trains in it",
    (ViewState.FORMING, ViewState.ABANDONED): "a newer view was proposed, or the run is stopped",
    (ViewState.IN_FORCE, ViewState.ABANDONED): "a newer view is in force, or the run is stopped",
}  # ABANDONED has no way out: who goes on does so in a newer view


class IllegalViewTransition(AtollError):
    """A transition that VIEW_EDGES does not have: a bug in what decides about views."""

    def __init__(self, view: ViewRecord, after: ViewState) -> None:
        super().__init__(
            f"view {view.view} of {view.job} run {view.run} may not go from {view.state} to {after}: it is "
            f"{view.why or view.reason}"
        )


def move_view(view: ViewRecord, after: ViewState, why: str, unix_s: float) -> ViewRecord:
    """The view in its next state. Raises IllegalViewTransition."""
    if (view.state, after) not in VIEW_EDGES:
        raise IllegalViewTransition(view, after)
    moved = replace(view, state=after, why=why)
    match after:
        case ViewState.FORMING:
            return replace(moved, forming_unix_s=unix_s)
        case ViewState.IN_FORCE:
            return replace(moved, in_force_unix_s=unix_s)
        case _:
            return moved


def views_table() -> str:
    """VIEW_EDGES as a markdown table, for docs/membership.md."""
    rows = [f"| {before} | {after} | {cause} |" for (before, after), cause in VIEW_EDGES.items()]
    return "\n".join(["| from | to | when |", "|---|---|---|", *rows]) + "\n"


def changed_event(view: ViewRecord, ways: Sequence[WayIn], level: Level) -> NewEvent:
    """Return the event of a change of members or strategy, with the parts of the pause.

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
    kind = EventKind.CHANGED_AT_BOUNDARY if view.at_boundary else EventKind.CHANGED_IN_PLACE
    switched = bool(view.previous_strategy)
    return NewEvent(
        kind=EventKind.STRATEGY_CHANGED if switched else kind,
        level=level,
        view=view.view,
        step=view.step,
        cause=view.reason if switched else "",
        strategies=(view.previous_strategy, view.strategy) if switched else (),
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
