"""Events by fields: each kind has a sentence, and all fields survive etcd and the wire."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from atoll.controller.jobs.lifecycle.recovery import recovery_event
from atoll.controller.jobs.membership.life import changed_event, first_step_event
from atoll.controller.jobs.model.observed import WayIn
from atoll.controller.jobs.records.wire import event_to_wire
from atoll.controller.state.codec import decode, encode
from atoll.controller.state.events import EventKind, EventRecord, NewEvent, TimedPart
from atoll.controller.state.records import Level
from atoll.controller.state.recovery import RecoveryRecord
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState
from atoll.v1 import common_pb2 as common

FILLED = NewEvent(
    kind=EventKind.RECOVERED,
    level=Level.WARNING,
    run=3,
    cause="rank 1 was killed",
    rank=0,
    node="b",
    device="b/1",
    view=2,
    step=0,
    plan=4,
    planner="even",
    tier="memory",
    steps_lost=0,
    workers=2,
    ranks=(0, 2),
    at_boundary=True,
    devices=("a/0", "b/1"),
    lost=("rank 1 on b",),
    joined=("c",),
    strategies=("dense", "local-steps"),
    count=5,
    by="ann",
    total_s=1.5,
    parts=(TimedPart("ending", 0.5), TimedPart("starting", 1.0)),
)
RECORD = EventRecord.of(FILLED, sequence=9, unix_s=2.5, job="j", run=3)
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


@pytest.mark.parametrize("kind", EventKind)
def test_every_kind_has_a_sentence_and_a_name_on_the_wire(kind: EventKind) -> None:
    event = replace(RECORD, kind=kind)
    assert event.text
    assert event.cause in event.text or event.by in event.text or event.parts or event.count
    assert common.EventKind.Name(event_to_wire(event).kind) == f"EVENT_KIND_{kind}"


def test_every_kind_of_the_wire_is_one_of_the_record() -> None:
    assert {f"EVENT_KIND_{kind}" for kind in EventKind} == set(common.EventKind.keys()) - {"EVENT_KIND_UNSPECIFIED"}


def test_every_field_survives_etcd_and_the_wire() -> None:
    """A rank, a step and a count of lost steps of 0 are not the same as none."""
    assert decode(EventRecord, "k", encode(RECORD)) == RECORD
    sent = common.Event.FromString(event_to_wire(RECORD).SerializeToString())
    assert {name.name for name in common.Event.DESCRIPTOR.fields} == {field.name for field in fields(RECORD)} | {"text"}
    for field in fields(RECORD):
        mine, theirs = getattr(RECORD, field.name), getattr(sent, field.name)
        assert mine != field.default, f"{field.name} is not tried"
        if field.name not in ("kind", "level", "parts"):
            assert (list(theirs) if isinstance(mine, tuple) else theirs) == (
                list(mine) if isinstance(mine, tuple) else mine
            )
    assert [(part.name, part.seconds) for part in sent.parts] == [("ending", 0.5), ("starting", 1.0)]
    assert (sent.level, sent.text) == (common.LEVEL_WARNING, RECORD.text)
    bare = event_to_wire(EventRecord(kind=EventKind.NOTICE, sequence=1, unix_s=0.0, job="", cause="x"))
    assert [bare.HasField(name) for name in ("rank", "step", "steps_lost")] == [False, False, False]


def test_a_change_of_members_says_how_long_each_part_of_the_pause_took() -> None:
    event = changed_event(VIEW, [WAY], Level.INFO)
    assert [part.name for part in event.parts] == ["noticed", "aborted", "told", "formed", "agreed", "first step"]
    assert [part.seconds for part in event.parts] == pytest.approx([0.05, 0.1, 0.15, 0.15, 0.1, 0.4])
    assert (event.total_s, event.view, event.step, event.workers) == (pytest.approx(0.95), 2, 9, 2)
    assert event.text == (
        "view 2: 2 workers continued in place after 0.95 s from step 9: 0.05 noticed, 0.10 aborted, 0.15 told, "
        "0.15 formed, 0.10 agreed, 0.40 first step; rank 1 on b lost"
    )
    alone = changed_event(replace(VIEW, ranks=(0,), has_state=(0,)), [WAY], Level.WARNING)
    assert alone.text.startswith("view 2: 1 worker, alone, continued in place after 0.95 s")
    joined = changed_event(replace(VIEW, at_boundary=True, lost=(), joined=("rank 3 on c",)), [WAY], Level.INFO)
    assert (joined.kind, joined.parts[0].seconds) == (EventKind.CHANGED_AT_BOUNDARY, 0.0)
    assert joined.text.startswith("view 2: 2 workers paused for 0.90 s from step 9")
    assert joined.text.endswith("; rank 3 on c joined")


def test_the_first_step_of_a_launch_is_counted_from_it() -> None:
    launched = replace(VIEW, view=1, cause=ViewCause.LAUNCH)
    assert first_step_event(launched).text == "view 1: 2 workers completed their first step 1.7 s after the launch"
    alone = first_step_event(replace(launched, ranks=(0,)))
    assert alone.text == "view 1: 1 worker completed its first step 1.7 s after the launch"


@pytest.mark.parametrize("resize", [False, True])
def test_a_recovery_says_how_long_each_part_took(resize: bool) -> None:
    event = recovery_event(
        RecoveryRecord(
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
    )
    assert event.kind is (EventKind.RESIZED if resize else EventKind.RECOVERED)
    assert [part.name for part in event.parts] == ["detecting", "ending", "waiting for devices", "starting"]
    assert [part.seconds for part in event.parts] == pytest.approx([0.4, 0.9, 1.0, 1.6])
    assert event.total_s == pytest.approx(3.9)
