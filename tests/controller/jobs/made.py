"""Records and views for tests, with what does not matter filled in."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, TypeVar

from atoll.controller.deciding.first import Place, first_plan
from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.model.observed import (
    ObservedJob,
    ObservedNode,
    ObservedWorker,
    PassClock,
    WorkerPhase,
)
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.state.records import (
    DeviceRecord,
    ExitRecord,
    JobPhase,
    JobRecord,
    NodeRecord,
    PlanRecord,
    RunMember,
    RunRecord,
    WorkerExitKind,
)
from atoll.jobs.job_spec import JobSpec
from atoll.jobs.worker_key import WorkerKey
from atoll.step_estimators.estimates import NodeEstimate, RankProfile

JOB = "tiny-0001"
NOW_S = 1000.0
Changed = TypeVar("Changed", JobRecord, ObservedJob)


def spec(**fields: Any) -> JobSpec:
    return JobSpec(
        **{"name": "tiny", "script": "train.py", "code_sha256": "0" * 64, "max_workers": 2, "max_restarts": 0, **fields}
    )


def job(phase: JobPhase = JobPhase.RUNNING, run: int = 1, **fields: Any) -> JobRecord:
    """fields: of JobRecord, or of its parts."""
    bare = JobRecord(id=JOB, spec=spec(), request_id="r")
    return changed(bare, phase=phase, run=run, **fields)


def run(*nodes: str, number: int = 1, **fields: Any) -> RunRecord:
    members = tuple(
        RunMember(rank=i, node=node, device=0, node_rank=i, local_rank=0, local_world_size=1)
        for i, node in enumerate(nodes)
    )
    return RunRecord(
        **{
            "job": JOB,
            "run": number,
            "members": members,
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "began_unix_s": 0.0,
            **fields,
        }
    )


def ended(record: RunRecord, *exits: ExitRecord | None) -> RunRecord:
    members = tuple(
        replace(m, exit=e and replace(e, order=i)) for i, (m, e) in enumerate(zip(record.members, exits, strict=True))
    )
    return replace(record, members=members)


def exited(kind: WorkerExitKind, code: int = 0, reason: str = "", step: int = 0) -> ExitRecord:
    return ExitRecord(kind=kind, code=code, reason=reason, step=step)


def worker(
    phase: WorkerPhase = WorkerPhase.RUNNING,
    exit: ExitRecord | None = None,
    step: int = 0,
    uses_atoll: bool = True,
    trained: bool = False,
) -> ObservedWorker:
    return ObservedWorker(WorkerPhase.EXITED if exit else phase, step, 1, uses_atoll, exit, trained)


def node(
    name: str,
    workers: dict[int, ObservedWorker] | None = None,
    connected: bool = True,
    last_message_s: float | None = NOW_S,
    *,
    run: int = 1,
    work_per_s: float = 0.0,
) -> ObservedNode:
    device = DeviceRecord(index=0, kind="cpu", model="fake", memory_bytes=1, speed=1.0, work_per_s=work_per_s)
    record = NodeRecord(name=name, island="here", address=f"{name}.lan", memory_bytes=1, devices=(device,), version="0")
    keyed = {WorkerKey(JOB, run, rank): observed for rank, observed in (workers or {}).items()}
    return ObservedNode(record, connected, last_message_s, keyed, (29500,))


def free(name: str, since_s: float = 0.0, speed: float = 1.0, kind: str = "cpu", **fields: Any) -> FreeDevice:
    return FreeDevice(name, fields.pop("index", 0), kind, speed, since_s, **fields)


def profile(*speeds: float, total_batch: int = 240, modelled: bool = True, plan: int = 1, **fields: Any) -> Profile:
    """Of ranks of these speeds: a sample takes 1 ms at speed 1, a step 20 ms more; batches equal the split by speed."""
    ranks = {}
    for rank, speed in enumerate(speeds):
        batch = round(total_batch * speed / sum(speeds))
        estimate = NodeEstimate(
            q=0.0004 / speed,
            s=0.01 / speed,
            k=0.0006 / speed,
            m=0.01 / speed,
            error=0.01,
            low_batch=1,
            high_batch=batch,
        )
        ranks[rank] = RankProfile(
            plan=plan,
            local_batch=batch,
            compute_s=estimate.compute_s(batch),
            compute_error_s=0.001,
            steps=40,
            estimate=estimate if modelled else None,
        )
    step_s = max(rank.compute_s for rank in ranks.values())
    values = {"entries": 1000, "step_s": step_s, "steps": 40, "newest_step": 90, "ranks": ranks, **fields}
    return Profile(plan=plan, total_batch=total_batch, **values)


def observed(
    job: JobRecord, run: RunRecord | None, *nodes: ObservedNode, since_s: float = NOW_S - 20, **fields: Any
) -> ObservedJob:
    """fields: of ObservedJob, or of its parts."""
    plans: tuple[PlanRecord, ...] = ()
    if run is not None and "issued" not in fields:
        places = [Place(m.node, m.device, 1.0) for m in run.members]
        plans = (first_plan(run.run, "even", places, {}, 0),)
    ports = {n.record.name: n.ports for n in nodes if n.connected}
    bare = ObservedJob(job=job, run=run, nodes={n.record.name: n for n in nodes}, since_s=since_s)
    return changed(bare, **{"issued": plans, "ports": ports, **fields})


def changed(record: Changed, **fields: Any) -> Changed:
    """fields: of the record, or of its parts; the first part that has one gets it."""
    for part in ("status", "learned", "plans", "training", "devices"):
        if (before := getattr(record, part, None)) is not None:
            own = {one.name for one in dataclasses.fields(before)} & fields.keys()
            after = replace(before, **{name: fields.pop(name) for name in own})
            record = replace(record, **{part: after})  # type: ignore[arg-type]
    return replace(record, **fields)


def clock(now_s: float = NOW_S, awaiting_since_s: float = 0.0) -> PassClock:
    return PassClock(now_s, unix_s=5.0, awaiting_since_s=awaiting_since_s, node_lease_s=3.0)
