"""Retention of jobs in etcd: how much stays, and the changes that remove the rest. Pure: the ledger writes them.

What grows with a job's life is bounded while it lives; a job that is over stays until KEPT_ENDED_JOBS newer ones have
ended, or until somebody removes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from atoll.controller.state import keys
from atoll.controller.state.codec import encode
from atoll.controller.state.records import JobRecord, PlanRecord
from atoll.controller.state.store import Change, Delete, DeletePrefix, Put
from atoll.jobs.etcd_record import EtcdRecord

KEPT_ENDED_JOBS: Final = 100
KEPT_EVENTS: Final = 1000
KEPT_ADMISSIONS: Final = 100
KEPT_RUNS: Final = 64
KEPT_VIEWS: Final = 64
KEPT_PLANS: Final = 200
"""The newest of a run, beside its first, which launches carry. A worker takes plans in order, none left out: one that
lacks more than these was silent for so long that it counts as lost."""


def all_of(job: JobRecord) -> list[Change]:
    """Remove the job with all that is its own, but for its code, which others may use."""
    return [
        Delete(keys.job(job.id)),
        Delete(keys.request(job.request_id)),
        DeletePrefix(keys.runs_prefix(job.id)),
        DeletePrefix(keys.plans_prefix(job.id)),
        DeletePrefix(keys.placements_prefix(job.id)),
        DeletePrefix(keys.views_prefix(job.id)),
        DeletePrefix(keys.admissions_prefix(job.id)),
        DeletePrefix(keys.events_prefix(job.id)),
        Delete(keys.commit(job.id)),
    ]


def outlived_by_run(job: str, run: int) -> list[Change]:
    """Remove what goes when this run begins: an old run with its plans, its placement and its views."""
    old = run - KEPT_RUNS
    if old < 1:
        return []
    return [
        Delete(keys.run(job, old)),
        DeletePrefix(keys.plans_prefix(job, old)),
        Delete(keys.placement(job, old)),
        DeletePrefix(keys.views_prefix(job, old)),
    ]


def newest(key: Callable[[int], str], number: int, record: EtcdRecord, kept: int, oldest: int = 1) -> list[Change]:
    """Write a record under its number, and remove the one that is no longer among the newest `kept`.

    key: of a number. oldest: records before this number stay for good."""
    old = number - kept
    return [Put(key(number), encode(record)), *([Delete(key(old))] if old >= oldest else [])]


def kept(plans: Sequence[PlanRecord]) -> tuple[PlanRecord, ...]:
    """Return the plans of a run that etcd still has. plans: all of them, oldest first."""
    return tuple(plans) if len(plans) <= KEPT_PLANS + 1 else (plans[0], *plans[-KEPT_PLANS:])
