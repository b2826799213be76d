from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.controller.jobs.membership.life import VIEW_EDGES, IllegalViewTransition, move_view, views_table
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState

VIEW = ViewRecord(
    job="demo-1",
    run=3,
    view=2,
    state=ViewState.PROPOSED,
    cause=ViewCause.LOSS,
    reason="rank 1 on b was killed",
    ranks=(0, 2),
    has_state=(0, 2),
    master_address="127.0.0.1",
    master_port=20000,
    plan=4,
    wanted=3,
)


def test_every_state_is_reached_and_an_abandoned_view_is_never_taken_up_again() -> None:
    assert {after for _, after in VIEW_EDGES} == set(ViewState) - {ViewState.PROPOSED}
    assert not [edge for edge in VIEW_EDGES if edge[0] is ViewState.ABANDONED]


@pytest.mark.parametrize("before", ViewState)
@pytest.mark.parametrize("after", ViewState)
def test_only_the_edges_of_the_table_are_taken(before: ViewState, after: ViewState) -> None:
    view = replace(VIEW, state=before)
    if (before, after) in VIEW_EDGES:
        moved = move_view(view, after, "because", 7.0)
        assert (moved.state, moved.why) == (after, "because")
        assert moved.forming_unix_s == (7.0 if after is ViewState.FORMING else 0.0)
        assert moved.in_force_unix_s == (7.0 if after is ViewState.IN_FORCE else 0.0)
        return
    with pytest.raises(IllegalViewTransition, match=f"view 2 of demo-1 run 3 may not go from {before} to {after}"):
        move_view(view, after, "because", 7.0)


def test_the_docs_show_this_table() -> None:
    docs = Path(__file__).parents[4] / "docs" / "membership.md"
    assert views_table() in docs.read_text()
