from __future__ import annotations

from pathlib import Path

import pytest
from made import job

from atoll.controller.jobs.lifecycle.phases import EDGES, KEPT_CHANGES, IllegalTransition, advance
from atoll.controller.state.records import JobPhase


def test_every_phase_is_reached_and_ended_ones_are_never_left() -> None:
    assert {after for _, after in EDGES} == set(JobPhase)
    assert not [edge for edge in EDGES if edge[0].ended]


def test_a_legal_edge_is_taken_with_its_story() -> None:
    moved = advance(job(JobPhase.RUNNING), JobPhase.DONE, "all ranks finished", 7.0)
    assert (moved.status.phase, moved.status.reason, moved.status.ended_unix_s) == (
        JobPhase.DONE,
        "all ranks finished",
        7.0,
    )
    assert [(c.before, c.after, c.cause) for c in moved.status.history] == [
        (JobPhase.RUNNING, JobPhase.DONE, "all ranks finished")
    ]


@pytest.mark.parametrize("before", JobPhase)
@pytest.mark.parametrize("after", JobPhase)
def test_every_other_edge_is_refused_with_the_history(before: JobPhase, after: JobPhase) -> None:
    if (before, after) in EDGES:
        assert advance(job(before), after, "why", 1.0).status.phase is after
        return
    with pytest.raises(IllegalTransition, match=f"may not go from {before} to {after}. Its history: none"):
        advance(job(before), after, "why", 1.0)


def test_the_history_of_a_job_that_restarts_for_ever_is_bounded() -> None:
    record = job(JobPhase.QUEUED)
    for _ in range(100):
        record = advance(record, JobPhase.STARTING, "s", 0.0)
        record = advance(record, JobPhase.STOPPING, "s", 0.0)
        record = advance(record, JobPhase.QUEUED, "s", 0.0)
    assert len(record.status.history) == KEPT_CHANGES


def test_the_docs_show_the_edges() -> None:
    rows = [f"| {before} | {after} | {cause} |" for (before, after), cause in EDGES.items()]
    table = "\n".join(["| from | to | when |", "|---|---|---|", *rows]) + "\n"
    docs = Path(__file__).parents[4] / "docs" / "architecture.md"
    assert table in docs.read_text()
