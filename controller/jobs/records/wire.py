"""Converts records to messages and messages to records. Nothing is decided here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from atoll.controller.jobs.model.observed import ObservedWorker, WorkerPhase
from atoll.controller.jobs.model.observed_views import ViewStage, WayIn, WorkerStanding
from atoll.controller.state.events import EventRecord
from atoll.controller.state.records import (
    DeviceRecord,
    ExitRecord,
    Level,
    NodeRecord,
    PlanRecord,
    WorkerExitKind,
)
from atoll.controller.state.recovery import RecoveryRecord
from atoll.jobs import job_spec
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_REASON
from atoll.strategies.declaration import as_json
from atoll.v1 import agents_pb2, common_pb2, jobs_pb2

_PHASES: Final = {
    common_pb2.WORKER_STATE_STARTING: WorkerPhase.STARTING,
    common_pb2.WORKER_STATE_RUNNING: WorkerPhase.RUNNING,
    common_pb2.WORKER_STATE_STOPPING: WorkerPhase.STOPPING,
    common_pb2.WORKER_STATE_EXITED: WorkerPhase.EXITED,
}
_EXIT: Final = {
    common_pb2.ExitKind.Value(f"EXIT_KIND_{kind}"): kind for kind in WorkerExitKind if kind is not WorkerExitKind.LOST
}
MAX_LOST_RANKS: Final = 64
"""Lost ranks that are read from one worker's report."""
_NO_TIMES: Final = WayIn()
_VIEW_STAGES: Final = {common_pb2.ViewStage.Value(f"VIEW_STAGE_{stage.name}"): stage for stage in ViewStage}
_LEVELS: Final = {level: common_pb2.Level.Value(f"LEVEL_{level}") for level in Level}
_LEVEL_OF: Final[dict[int, Level]] = {value: level for level, value in _LEVELS.items()}


def worker_from_wire(status: common_pb2.WorkerStatus) -> ObservedWorker:
    phase = _PHASES.get(status.state, WorkerPhase.STARTING)
    exit = None
    if phase is WorkerPhase.EXITED:
        exit = ExitRecord(
            kind=_EXIT.get(status.exit_kind, WorkerExitKind.FAILED),
            code=status.exit_code,
            reason=status.reason[:MAX_REASON],
            step=status.step,
            uses_atoll=status.uses_atoll,
        )
    return ObservedWorker(
        phase, status.step, status.plan, status.uses_atoll, exit, status.trained, _standing(status.view)
    )


def _standing(report: common_pb2.ViewReport) -> WorkerStanding | None:
    """Read a worker's report on the views of its run; None if it reports none, or a stage of another version."""
    if (stage := _VIEW_STAGES.get(report.stage)) is None:
        return None
    way = _NO_TIMES
    if report.HasField("times"):
        times = report.times
        way = WayIn(times.aborted_s, times.told_s, times.met_s, times.agreed_s, times.first_step_s)
    return WorkerStanding(
        report.view,
        stage,
        report.step,
        report.reason[:MAX_REASON],
        tuple(report.lost[:MAX_LOST_RANKS]),
        way,
        report.takes_in,
        report.tolerates_loss_mid_step,
        report.handed_bytes,
    )


def exit_to_wire(key: WorkerKey, exit: ExitRecord) -> common_pb2.WorkerStatus:
    """Make the status of a worker whose end is recorded and whose agent has forgotten it."""
    kind = common_pb2.EXIT_KIND_UNSPECIFIED
    if exit.kind is not WorkerExitKind.LOST:
        kind = common_pb2.ExitKind.Value(f"EXIT_KIND_{exit.kind}")
    return common_pb2.WorkerStatus(
        id=key.to_wire(),
        state=common_pb2.WORKER_STATE_EXITED,
        exit_code=exit.code,
        exit_kind=kind,
        reason=exit.reason,
        uses_atoll=exit.uses_atoll,
        step=exit.step,
    )


def node_from_wire(register: agents_pb2.Register) -> NodeRecord:
    return NodeRecord(
        name=register.name,
        island=register.island or "default",
        address=register.address,
        memory_bytes=register.memory_bytes,
        devices=tuple(DeviceRecord(**job_spec.values_of(device)) for device in register.devices),
        version=register.version,
        host=register.host,
        rack=register.rack,
        checkpoint_memory_bytes=register.checkpoint_memory_bytes,
        shards_port=0 if register.volunteer else register.shards_port,
        shards_key=register.shards_key.hex(),
        volunteer=register.volunteer,
        behind_nat=register.behind_nat,
    )


def device_to_wire(device: DeviceRecord) -> common_pb2.Device:
    return common_pb2.Device(**asdict(device))


def plan_to_wire(plan: PlanRecord) -> common_pb2.Plan:
    return common_pb2.Plan(
        id=plan.id,
        view=plan.view,
        run=plan.run,
        from_step=plan.from_step,
        shares=plan.shares,
        planner=plan.planner,
        reason=plan.reason,
        strategy_params=as_json(plan.strategy_params),
        total_batch=plan.total_batch,
        learning_rate_factor=plan.learning_rate_factor,
        predicted_step_s=plan.predicted_s,
    )


def recovery_to_wire(recovery: RecoveryRecord) -> jobs_pb2.Recovery:
    told = asdict(recovery) | {"steps_lost": recovery.steps_lost}
    del told["began_step"]  # only used to count steps
    return jobs_pb2.Recovery(**told)


def event_to_wire(event: EventRecord) -> common_pb2.Event:
    return common_pb2.Event(
        sequence=event.sequence,
        unix_s=event.unix_s,
        level=_LEVELS[event.level],
        job=event.job,
        run=event.run,
        kind=common_pb2.EventKind.Value(f"EVENT_KIND_{event.kind}"),
        text=event.text,
        cause=event.cause,
        rank=event.rank,
        node=event.node,
        device=event.device,
        view=event.view,
        step=event.step,
        plan=event.plan,
        planner=event.planner,
        tier=event.tier,
        steps_lost=event.steps_lost,
        workers=event.workers,
        ranks=event.ranks,
        at_boundary=event.at_boundary,
        devices=event.devices,
        lost=event.lost,
        joined=event.joined,
        count=event.count,
        by=event.by,
        total_s=event.total_s,
        parts=[common_pb2.TimedPart(name=part.name, seconds=part.seconds) for part in event.parts],
    )


def level_from_wire(level: int) -> Level:
    return _LEVEL_OF.get(level, Level.INFO)
