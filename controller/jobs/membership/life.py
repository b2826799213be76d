"""The states of a view, every legal transition between them, and what causes each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

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
