"""A job's events as spans: what real jobs were told of, and what is shown of it."""

from __future__ import annotations

from recorded import (
    BEGINNING,
    CANCELLED,
    DONE,
    FAILED,
    IN_PLACE,
    KILLED,
    LOST,
    RESTARTED,
    SUBMITTED_UNIX_S,
    TWICE,
    Recorded,
    recorded_events,
    recorded_job,
)

from atoll.cli.traces.spans import JobSpan, span_id, spans_of, trace_id


def spans(told: list[Recorded]) -> list[JobSpan]:
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
    assert moments["starting"] == [("plan_issued", "info")]
    assert moments["running"] == [
        ("worker_ended", "warning"),
        ("workers_joining", "info"),
        ("view_proposed", "warning"),
        ("cancel_requested", "info"),
    ]
    running = next(span for span in found if span.name == "running")
    assert running.moments[0].attributes["atoll.text"] == f"run 1: rank 1 on local-1 {LOST}"
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


def test_a_kind_that_is_not_known_is_a_moment() -> None:
    newer = recorded_events(BEGINNING)[-1]
    newer.kind, newer.text, newer.sequence = 999, "of a newer version", len(BEGINNING) + 1  # type: ignore[assignment]
    found = spans_of(recorded_job(), [*recorded_events(BEGINNING), newer])
    running = next(span for span in found if span.name == "running")
    assert [(moment.name, moment.attributes["atoll.text"]) for moment in running.moments] == [("999", newer.text)]
