from __future__ import annotations

from dataclasses import replace

import pytest
from made import ended, exited, job, run, spec

from atoll.controller.deciding.first import Place, first_plan, pinned_plan
from atoll.controller.jobs.model.device_memory import (
    UNKNOWN,
    after_overflow,
    after_training,
    overfull,
    with_overflows,
)
from atoll.controller.jobs.model.failures import judge
from atoll.controller.state.records import DeviceMemory, JobLearned, JobPhase, JobPins, WorkerExitKind
from atoll.step_estimators.estimates import RankProfile

OVERFLOW = exited(WorkerExitKind.FAILED, 1, "torch.OutOfMemoryError: CUDA out of memory", step=7)


@pytest.mark.parametrize(
    ("known", "batch", "allowed"),
    [
        (UNKNOWN, 128, 64),  # nothing was trained: half of it
        (DeviceMemory(trained=128), 171, 149),  # half way
        (DeviceMemory(trained=128), 132, 128),
        (DeviceMemory(trained=128), 100, 90),  # larger samples than before
        (DeviceMemory(trained=128, measured=300), 171, 149),
        (UNKNOWN, 1, 1),
    ],
)
def test_an_overflow_lowers_the_bound(known: DeviceMemory, batch: int, allowed: int) -> None:
    after = after_overflow(known, batch)
    assert (after.max_batch, after.failed, after.repeated) == (allowed, batch, False)


@pytest.mark.parametrize("holds", [1, 2, 7, 100, 150, 170])
@pytest.mark.parametrize("trained", [0, 1, 128])
def test_no_size_overflows_twice_and_the_bound_comes_to_what_the_device_holds(holds: int, trained: int) -> None:
    known, tried = DeviceMemory(trained=min(trained, holds)), 171
    seen = []
    while tried > holds:
        seen.append(tried)
        known = after_overflow(known, tried)
        assert not known.repeated
        tried = known.max_batch
    assert len(set(seen)) == len(seen) <= 8
    assert tried >= min(trained, holds)


def test_an_overflow_of_a_size_that_overflowed_before_is_told_apart() -> None:
    """A user's own shares, or a total that fits nowhere, may ask for it again."""
    assert after_overflow(after_overflow(UNKNOWN, 100), 100).repeated


def test_what_a_device_trained_is_remembered() -> None:
    profile = RankProfile(
        plan=2, local_batch=100, compute_s=1.0, compute_error_s=0.1, steps=5, trained_batch=128, max_batch=300
    )
    assert after_training(DeviceMemory(trained=64), profile) == DeviceMemory(trained=128, measured=300)
    assert after_training(DeviceMemory(trained=200), profile).trained == 200
    unknown = replace(profile, max_batch=0)
    assert after_training(DeviceMemory(measured=250), unknown).measured == 250
    assert after_training(DeviceMemory(failed=280, allowed=200), profile).max_batch == 200


def test_the_ends_of_workers_lower_bounds_once() -> None:
    before = run("a", "b")
    after = ended(before, None, replace(OVERFLOW, overflow_batch=171))
    learned, events = with_overflows(JobLearned(memory={"b/0": DeviceMemory(trained=128)}), before, after)
    assert learned.memory["b/0"].max_batch == 149
    assert [event.cause for event in events] == [
        "b/0 ran out of memory with 171 samples: plans give it at most 149 from now on"
    ]
    assert with_overflows(learned, after, after) == (learned, ())


def test_a_job_whose_bound_was_lowered_continues_without_using_up_a_restart() -> None:
    record = ended(run("a", "b"), replace(OVERFLOW, overflow_batch=171), exited(WorkerExitKind.PEER_LOST, 75))
    stopping = job(JobPhase.STOPPING, spec=spec(max_restarts=0), memory={"a/0": DeviceMemory(failed=171, allowed=149)})
    verdict = judge(stopping, record)
    assert (verdict.after, verdict.counts, verdict.retry_delay_s) == (JobPhase.QUEUED, False, 0.0)
    assert verdict.reason == (
        "rank 0 on a ran out of memory with 171 samples (torch.OutOfMemoryError: CUDA out of memory); the next run "
        "gives it at most 149"
    )
    again = job(JobPhase.STOPPING, spec=spec(max_restarts=0), memory={"a/0": DeviceMemory(failed=171, repeated=True)})
    assert judge(again, record).after is JobPhase.FAILED


def test_a_device_that_does_not_hold_one_sample_ends_the_job_with_what_helps() -> None:
    record = ended(run("a"), replace(OVERFLOW, overflow_batch=1))
    verdict = judge(job(JobPhase.STOPPING, spec=spec(max_restarts=3)), record)
    assert verdict.after is JobPhase.FAILED
    assert "a/0 does not hold a single one. Use a device with more memory" in verdict.reason


def test_a_users_shares_beyond_memory_are_warned_of() -> None:
    learned = JobLearned(total_batch=256, memory={"a/0": DeviceMemory(trained=128, measured=150)})
    current = first_plan(1, "even", [Place("a", 0, 1.0), Place("b", 0, 1.0)], {}, 256)
    pinned = pinned_plan(current, JobPins(shares=(2.0, 1.0)), 9)
    assert pinned is not None
    [event] = overfull(learned, run("a", "b").members, pinned)
    assert event.cause == (
        "a/0 is to train 171 samples at once, and memory is known to hold 150. If it runs out, plans with fewer follow"
    )
    assert not overfull(learned, run("a", "b").members, current)
    assert not overfull(learned, run("a", "b").members, replace(pinned, passes=2))
