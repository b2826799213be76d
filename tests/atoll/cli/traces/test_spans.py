"""A job's events as spans: what real jobs were told of, and what is shown of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded import (
    BEGINNING,
    CANCELLED,
    DONE,
    FAILED,
    IN_PLACE,
    KILLED,
    RESTARTED,
    SUBMITTED_UNIX_S,
    TWICE,
    Told,
    recorded_events,
    recorded_job,
)

from atoll.cli.traces.sentences import RecordedPause, is_first_step, pause_in
from atoll.cli.traces.spans import JobSpan, span_id, spans_of, trace_id
from atoll.controller.jobs.lifecycle.recovery import recovery_sentence
from atoll.controller.jobs.membership.observed_views import WayIn
from atoll.controller.jobs.membership.view_words import completed_sentence, first_step_sentence
from atoll.controller.state.recovery import RecoveryRecord
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState


def spans(told: list[Told]) -> list[JobSpan]:
    return spans_of(recorded_job(), recorded_events(told))


def shown(found: list[JobSpan]) -> list[tuple[str, str, float, float | None]]:
    """(parent's name, name, begin, end) of each, in seconds after the submit; None: not over."""
    names = {span.key: span.name for span in found} | {"": ""}

    def since(unix_s: float | None) -> float | None:
        return None if unix_s is None else round(unix_s - SUBMITTED_UNIX_S, 2)

    return [(names[s.parent], s.name, since(s.start_unix_s) or 0.0, since(s.end_unix_s)) for s in found]


JOB = "job vit-3f9a"
UNTIL_FIRST_STEP = [
    (JOB, "queued", 0.01, 0.02),
    (JOB, "run 1", 0.02, 18.45),
    ("run 1", "starting", 0.02, 0.27),
    ("run 1", "running", 0.27, 18.17),
    ("running", "first step", 0.27, 6.94),
]
CHANGE_IN_PLACE = [
    ("run 1", "change in place", 9.89, 13.09),
    ("change in place", "aborted", 9.89, 9.90),
    ("change in place", "told", 9.90, 12.65),
    ("change in place", "formed", 12.65, 12.73),
    ("change in place", "agreed", 12.73, 13.01),
    ("change in place", "first step", 13.01, 13.09),
]


def test_a_job_from_submit_to_cancel_with_a_change_in_place() -> None:
    """1. It waits, starts, comes to its first step. 2. A worker is killed and replaced while the run goes on: the parts
    of that lie one after the other. 3. Its user cancels it, which is no failure."""
    found = spans(CANCELLED)
    assert shown(found) == [
        ("", JOB, 0.0, 18.45),
        *UNTIL_FIRST_STEP,
        *CHANGE_IN_PLACE,
        ("run 1", "stopping", 18.17, 18.45),
    ]
    assert [span.failure for span in found] == [""] * len(found)
    assert {span.attributes["atoll.job.id"] for span in found} == {"vit-3f9a"}
    root = found[0].attributes
    assert (root["atoll.job.phase"], root["atoll.job.submit_to_first_step_s"]) == ("cancelled", 6.94)
    change = next(span for span in found if span.name == "change in place")
    assert (change.attributes["atoll.run"], change.attributes["atoll.view"]) == (1, 2)


def test_what_else_happens_is_a_moment_of_the_phase_in_which_it_does() -> None:
    """Plans, ends of workers, sentences that tell of no duration: each once, with its words and level."""
    found = spans(CANCELLED)
    moments = {span.name: [(m.name, m.attributes["atoll.level"]) for m in span.moments] for span in found}
    assert moments["starting"] == [("plan", "info")]
    assert moments["running"] == [
        ("worker", "warning"),
        ("membership", "info"),
        ("membership", "warning"),
        ("phase", "info"),
    ]
    running = next(span for span in found if span.name == "running")
    assert running.moments[0].attributes["atoll.text"] == CANCELLED[5][4]
    assert running.moments[0].unix_s == SUBMITTED_UNIX_S + CANCELLED[5][0]
    assert sum(len(span.moments) for span in found) == 6


def test_a_run_that_is_lost_has_failed_and_the_job_that_recovers_has_not() -> None:
    found = spans(RESTARTED)
    assert shown(found) == [
        ("", JOB, 0.0, 33.42),
        (JOB, "queued", 0.01, 0.02),
        (JOB, "run 1", 0.02, 9.62),
        ("run 1", "starting", 0.02, 0.27),
        ("run 1", "running", 0.27, 9.57),
        ("running", "first step", 0.27, 6.94),
        ("run 1", "stopping", 9.57, 9.62),
        (JOB, "queued", 9.62, 9.65),
        (JOB, "run 2", 9.65, 33.42),
        ("run 2", "starting", 9.65, 9.70),
        ("run 2", "running", 9.70, 33.42),
        (JOB, "recovery", 9.61, 16.21),
        ("recovery", "ending", 9.61, 9.71),
        ("recovery", "starting", 9.71, 16.21),
        ("running", "first step", 9.70, 16.74),
    ]
    assert {span.name: span.failure for span in found if span.failure} == {"run 1": KILLED}
    assert found[0].attributes["atoll.job.submit_to_first_step_s"] == 6.94  # of the first run


def test_a_job_that_fails_has_failed_with_all_its_runs() -> None:
    found = spans(FAILED)
    failures = {span.name: span.failure for span in found if span.failure}
    assert list(failures) == [JOB, "run 1", "run 2"]
    assert failures[JOB] == TWICE
    assert failures["run 2"].startswith("rank 1 on local-2 failed with exit code 1")
    assert "atoll.job.submit_to_first_step_s" not in found[0].attributes
    assert all(span.end_unix_s is not None for span in found)


def test_what_is_not_over_has_no_end_and_what_is_stays_as_it_was() -> None:
    """1. A job that runs: its span, its run's and its phase's are open. 2. It ends: those that were over are told the
    same once more, but for nothing."""
    lives, ended = spans(IN_PLACE), spans(DONE)
    assert [span.name for span in lives if span.end_unix_s is None] == [JOB, "run 1", "running"]
    assert all(span.end_unix_s is not None for span in ended)
    later = {span.key: span for span in ended}
    assert all(later[span.key] == span for span in lives if span.end_unix_s is not None)
    assert {span.key for span in lives} <= set(later)
    assert shown(spans(BEGINNING[:1])) == [("", JOB, 0.0, None), (JOB, "queued", 0.01, None)]
    assert shown(spans([])) == [("", JOB, 0.0, None)]


def test_ids_are_of_the_job_and_the_event_alone() -> None:
    found, again = spans(RESTARTED), spans(RESTARTED)
    job, of_another_time, other = recorded_job(), recorded_job(), recorded_job("vit-0000")
    of_another_time.submitted_unix_s += 1
    ids = [span_id(job, span.key) for span in found]
    assert ids == [span_id(job, span.key) for span in again]
    assert len(set(ids)) == len(ids)
    assert 0 < min(ids) <= max(ids) < 2**64
    assert 0 < trace_id(job) < 2**128
    assert len({trace_id(one) for one in (job, of_another_time, other)}) == 3


def test_a_long_job_whose_first_events_are_gone_has_what_is_left() -> None:
    """The newest thousand are kept. The job's own span begins at its submit, whatever is left."""
    events = recorded_events(RESTARTED)[6:]
    found = spans_of(recorded_job(), events)
    assert shown(found)[:3] == [("", JOB, 0.0, 33.42), (JOB, "queued", 9.62, 9.65), (JOB, "run 2", 9.65, 33.42)]
    assert "atoll.job.submit_to_first_step_s" not in found[0].attributes
    whole = {span.key: span for span in spans(RESTARTED)}
    assert all(whole[span.key] == span for span in found if span.name not in (JOB, "first step"))
    (stopping,) = spans_of(recorded_job(), recorded_events(RESTARTED)[5:6])[1:]
    assert (stopping.name, stopping.parent, stopping.failure) == ("stopping", "job", "")


def test_no_span_ends_before_it_begins_where_two_controllers_clocks_differ() -> None:
    told = [(at_s - (8.0 if n >= 3 else 0.0), *rest) for n, (at_s, *rest) in enumerate(CANCELLED)]
    assert all(s.end_unix_s is not None and s.end_unix_s >= s.start_unix_s for s in spans(told))  # type: ignore[arg-type]


def test_sentences_that_are_not_known_are_moments() -> None:
    odd = "view 2: 3 workers went on in place after a while"
    found = spans([*BEGINNING, (7.0, 1, "info", "membership", odd), (8.0, 1, "info", "news", "of a newer version")])
    running = next(span for span in found if span.name == "running")
    assert [moment.attributes["atoll.text"] for moment in running.moments] == [odd, "of a newer version"]


VIEW = ViewRecord(
    job="vit-3f9a",
    run=1,
    view=2,
    state=ViewState.IN_FORCE,
    cause=ViewCause.LOSS,
    reason="",
    ranks=(0, 2),
    has_state=(0, 2),
    master_address="a",
    master_port=1,
    plan=2,
    wanted=3,
    step=9,
    lost=("rank 1 on b",),
    seen_unix_s=10.0,
    proposed_unix_s=10.3,
    stepped_unix_s=12.0,
)
WAY = WayIn(aborted_s=0.1, told_s=0.25, met_s=0.4, agreed_s=0.5, first_step_s=0.9)


def test_what_the_controller_words_is_what_is_read() -> None:
    parts = (
        ("noticed", 0.05),
        ("aborted", 0.1),
        ("told", 0.15),
        ("formed", 0.15),
        ("agreed", 0.1),
        ("first step", 0.4),
    )
    for view in (VIEW, replace(VIEW, ranks=(0,), has_state=(0,))):
        assert pause_in(completed_sentence(view, [WAY])) == RecordedPause("change in place", 0.95, parts, 2)
    joined = replace(VIEW, at_boundary=True, lost=(), joined=("rank 3 on c",))
    boundary = pause_in(completed_sentence(joined, [WAY]))
    assert boundary == RecordedPause("change at a boundary", 0.9, (("noticed", 0.0), *parts[1:]), 2)
    launched = replace(VIEW, view=1, cause=ViewCause.LAUNCH)
    for count in (1, 2):
        assert is_first_step(first_step_sentence(replace(launched, ranks=tuple(range(count)))))


@pytest.mark.parametrize("resize", [False, True])
def test_a_recovery_s_sentence_is_read(resize: bool) -> None:
    recovery = RecoveryRecord(
        run=1,
        cause="",
        seen_unix_s=100.0,
        detected_unix_s=100.4,
        ended_unix_s=101.3,
        launched_unix_s=102.3,
        resumed_unix_s=103.9,
        tier="start",
        joined=("c",),
        resize=resize,
    )
    parts = (("detecting", 0.4), ("ending", 0.9), ("waiting for devices", 1.0), ("starting", 1.6))
    assert pause_in(recovery_sentence(recovery)) == RecordedPause("resize" if resize else "recovery", 3.9, parts, 0)
