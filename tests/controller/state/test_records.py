"""Records as JSON in etcd: what is written is read again, anything else is refused by key and field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from atoll.controller.state.codec import decode, encode
from atoll.controller.state.events import EventKind, EventRecord, TimedPart
from atoll.controller.state.records import (
    Cause,
    DeviceRecord,
    ExitRecord,
    Growth,
    JobLearned,
    JobPhase,
    JobPins,
    JobRecord,
    JobStatus,
    Level,
    NodeRecord,
    PhaseChange,
    PlanRecord,
    RunFailure,
    RunMember,
    RunRecord,
    Standby,
    WorkerExitKind,
)
from atoll.errors import BadInput
from atoll.jobs.job_spec import Checkpoint, JobSpec

KEY = "/atoll/jobs/vit-3f9a"
SPEC = JobSpec(
    name="vit",
    script="train.py",
    args=("--lr", "0.1"),
    env={"A": "ü"},
    code_sha256="ab" * 32,
    checkpoint=Checkpoint(directory="/data", every_steps=10, keep=2, memory_replicas=3),
    strategy="stale-sparse",
    strategy_settings={"sparsity": 0.5, "staleness": 0},
)
JOB = JobRecord(
    id="vit-3f9a",
    spec=SPEC,
    request_id="r-1",
    status=JobStatus(
        phase=JobPhase.RUNNING,
        last_failure=RunFailure(kind=WorkerExitKind.FAILED, step=3, code=1, reason="ValueError"),
        history=(PhaseChange(before=JobPhase.QUEUED, after=JobPhase.STARTING, cause="go", unix_s=1.5),),
    ),
    learned=JobLearned(
        speeds={"a/0": 0.25},
        learned_at={"a/0": 1e9},
        standby={"b/0": Standby(reason="slow", work_per_s=1e8, slowed=3)},
        growth=Growth(run=1, added=("c/1",), workers=2, samples_per_s=90.5, total_batch=64, error=0.01),
    ),
    pinned=JobPins(strategy_params={"sparsity": 0.25}),
)
MEMBER = RunMember(rank=0, node="a", device=0, node_rank=0, local_rank=0, local_world_size=1)
RUN = RunRecord(
    job="vit-3f9a",
    run=2,
    members=(
        MEMBER,
        RunMember(
            rank=1,
            node="b",
            device=1,
            node_rank=1,
            local_rank=0,
            local_world_size=1,
            exit=ExitRecord(kind=WorkerExitKind.LOST, reason="gone"),
        ),
    ),
    master_address="10.0.0.1",
    master_port=29500,
    began_unix_s=1.0,
    fenced=True,
    cause=Cause.LOSS,
    data_seed="5e" * 32,
)
PLAN = PlanRecord(
    run=2,
    id=1,
    from_step=0,
    shares=(1.0, 0.5),
    planner="even",
    reason="r",
    input="{}",
    output="{}",
    strategy_params={"sparsity": 0.9},
    total_batch=96,
    learning_rate_factor=1.5,
    predicted_s=0.25,
)
DEVICE = DeviceRecord(index=0, kind="cpu", model="x", memory_bytes=1, speed=0.5, work_per_s=1e9)
NODE = NodeRecord(name="a", island="x", address="h", memory_bytes=2**40, devices=(DEVICE,), version="1")
EVENT = EventRecord(
    kind=EventKind.RECOVERED,
    level=Level.WARNING,
    sequence=1,
    unix_s=0.5,
    job="j",
    run=2,
    cause="→",
    rank=0,
    step=7,
    steps_lost=0,
    ranks=(0, 2),
    lost=("rank 1 on b",),
    total_s=1.5,
    parts=(TimedPart("ending", 0.5), TimedPart("starting", 1.0)),
)


@pytest.mark.parametrize("record", [JOB, RUN, PLAN, NODE, EVENT])
def test_what_was_written_is_read_again(record: Any) -> None:
    assert decode(type(record), KEY, encode(record)) == record
    assert encode(decode(type(record), KEY, encode(record))) == encode(record)


def test_a_missing_field_takes_its_default() -> None:
    data = json.loads(encode(JOB))
    del data["pinned"], data["learned"]["growth"], data["spec"]["checkpoint"]["keep"]
    read = decode(JobRecord, KEY, json.dumps(data).encode())
    assert SPEC.checkpoint.keep == Checkpoint().keep
    assert read == replace(JOB, pinned=JobPins(), learned=replace(JOB.learned, growth=None))


def test_the_secret_of_a_run_is_not_printed_with_it() -> None:
    assert RUN.data_seed not in repr(RUN)


def changed(**fields: Any) -> bytes:
    data = json.loads(encode(JOB))
    for path, value in fields.items():
        *above, last = path.split("__")
        inner = data
        for name in above:
            inner = inner[int(name) if name.isdigit() else name]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"{", "does not hold JSON"),
        (b"\xff\xfe", "does not hold JSON"),
        (b"[]", r"value = \[\] does not fit"),
        (changed(colour="blue"), "unknown field colour"),
        (changed(spec__colour="blue"), "unknown field spec.colour"),
        (changed(request_id=None), "field request_id is missing"),
        (changed(spec__strategy_settings__sparsity=1.0), "spec.strategy_settings.sparsity = 1.0 should be less than"),
        (changed(spec__strategy_settings__colour=1), "spec.strategy_settings.colour = 1 is not known"),
        (changed(spec__strategy="ring"), "spec.strategy = 'ring' is not known"),
        (changed(spec__script=None), "field spec.script is missing"),
        (changed(status__phase="ASLEEP"), "status.phase = 'ASLEEP' does not fit"),
        (changed(status__run=1.5), "status.run = 1.5 does not fit"),
        (changed(status__run=True), "status.run = True does not fit"),
        (changed(cancel=1), "cancel = 1 does not fit"),
        (changed(spec__args=["a", 2]), r"spec.args\[1\] = 2 does not fit"),
        (changed(learned__speeds={"a/0": "fast"}), r"learned.speeds\['a/0'\] = 'fast' does not fit"),
        (changed(status__history__0__after="ASLEEP"), r"status.history\[0\].after = 'ASLEEP' does not fit"),
        (changed(submitted_unix_s=True), "submitted_unix_s = True does not fit"),
        (encode(JOB).replace(b"1.5", b"1e999"), "unix_s = inf does not fit"),
    ],
)
def test_what_another_version_wrote_is_refused_by_key_and_field(value: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=f"etcd key {KEY}.*{message}"):
        decode(JobRecord, KEY, value)


def test_a_number_without_a_fraction_is_a_number() -> None:
    assert decode(JobRecord, KEY, changed(submitted_unix_s=3)).submitted_unix_s == 3.0


def test_what_is_no_number_is_never_written() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode(EventRecord(kind=EventKind.NOTICE, sequence=1, unix_s=float("nan"), job=""))
