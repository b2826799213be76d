"""Converts records to messages and messages to records. Nothing is decided here."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from google.protobuf.message import Message

from atoll.controller.jobs.model.observed import ObservedWorker, ViewStage, WayIn, WorkerPhase, WorkerViewReport
from atoll.controller.state.events import EventRecord
from atoll.controller.state.records import DeviceRecord, ExitRecord, Level, NodeRecord, PlanRecord, WorkerExitKind
from atoll.jobs import job_spec
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_REASON
from atoll.strategies.declaration import as_json
from atoll.v1 import agents_pb2, common_pb2

_PHASES: Final = {common_pb2.WorkerState.Value(f"WORKER_STATE_{phase.name}"): phase for phase in WorkerPhase}
_EXIT: Final = {
    common_pb2.ExitKind.Value(f"EXIT_KIND_{kind}"): kind for kind in WorkerExitKind if kind is not WorkerExitKind.LOST
}
MAX_LOST_RANKS: Final = 64
"""Lost ranks that are read from one worker's report."""
_NO_TIMES: Final = WayIn()
_VIEW_STAGES: Final = {common_pb2.ViewStage.Value(f"VIEW_STAGE_{stage.name}"): stage for stage in ViewStage}
_LEVELS: Final = {level: common_pb2.Level.Value(f"LEVEL_{level}") for level in Level}
_LEVEL_OF: Final[dict[int, Level]] = {value: level for level, value in _LEVELS.items()}


def shared_fields(kind: type[Message], record: object) -> dict[str, Any]:
    """Return the values that a record and a kind of message have under the same name."""
    names = [field.name for field in kind.DESCRIPTOR.fields]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


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
            overflow_batch=status.overflow_batch,
        )
    return ObservedWorker(
        phase, status.step, status.plan, status.uses_atoll, exit, status.trained, _view_report(status.view)
    )


def _view_report(report: common_pb2.ViewReport) -> WorkerViewReport | None:
    """Read a worker's report on the views of its run; None if it reports none, or a stage of another version."""
    if (stage := _VIEW_STAGES.get(report.stage)) is None:
        return None
    way = _NO_TIMES
    if report.HasField("times"):
        times = report.times
        way = WayIn(times.aborted_s, times.told_s, times.met_s, times.agreed_s, times.first_step_s)
    return WorkerViewReport(
        report.view,
        stage,
        report.step,
        report.reason[:MAX_REASON],
        tuple(report.lost[:MAX_LOST_RANKS]),
        way,
        report.takes_in,
        report.tolerates_loss_mid_step,
        report.handed_bytes,
        report.strategy,
        report.refusal[:MAX_REASON],
        report.overflow_batch,
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
        **shared_fields(common_pb2.WorkerStatus, exit),
    )


def node_from_wire(register: agents_pb2.Register) -> NodeRecord:
    """The record has the operator's island; the caller places a node without one."""
    fields: dict[str, Any] = {one.name: getattr(register, one.name, "") for one in dataclasses.fields(NodeRecord)}
    fields["named_island"] = register.island
    fields["devices"] = tuple(DeviceRecord(**job_spec.values_of(device)) for device in register.devices)
    fields["shards_port"] = 0 if register.volunteer else register.shards_port
    fields["shards_key"] = register.shards_key.hex()
    return NodeRecord(**fields)


def plan_to_wire(plan: PlanRecord) -> common_pb2.Plan:
    fields = shared_fields(common_pb2.Plan, plan)
    fields |= {"strategy_params": as_json(plan.strategy_params), "predicted_step_s": plan.predicted_s}
    fields["passes"] = plan.passes if plan.passes > 1 else 0
    return common_pb2.Plan(**fields)


def event_to_wire(event: EventRecord) -> common_pb2.Event:
    fields = shared_fields(common_pb2.Event, event)
    fields |= {"level": _LEVELS[event.level], "kind": common_pb2.EventKind.Value(f"EVENT_KIND_{event.kind}")}
    fields["parts"] = [common_pb2.TimedPart(name=part.name, seconds=part.seconds) for part in event.parts]
    return common_pb2.Event(**fields)


def level_from_wire(level: int) -> Level:
    return _LEVEL_OF.get(level, Level.INFO)
