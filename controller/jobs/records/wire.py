"""Between records and messages. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from atoll.controller.jobs.agents.data_keys import private_key, public_key, public_keys, volunteers_secret
from atoll.controller.jobs.agents.replica_placement import holders
from atoll.controller.jobs.lifecycle.observed import (
    DropMemory,
    ForgetWorker,
    ObservedWorker,
    StopRun,
    WorkerPhase,
)
from atoll.controller.jobs.membership.observed_views import WorkerStanding
from atoll.controller.jobs.volunteers.helping import LaunchHelper
from atoll.controller.state.records import (
    DeviceRecord,
    EventRecord,
    ExitRecord,
    JobRecord,
    Level,
    NodeRecord,
    PlacementRecord,
    PlanRecord,
    RunRecord,
    WorkerExitKind,
)
from atoll.controller.state.recovery import RecoveryRecord
from atoll.jobs import job_spec
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_REASON
from atoll.security.volunteer_ticket import ticket
from atoll.strategies import registry
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
_LEVELS: Final = {level: common_pb2.Level.Value(f"LEVEL_{level}") for level in Level}
_LEVEL_OF: Final[dict[int, Level]] = {value: level for level, value in _LEVELS.items()}


def worker_from_wire(status: common_pb2.WorkerStatus, standing: WorkerStanding | None) -> ObservedWorker:
    """standing: its word about the views of its run."""
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
    return ObservedWorker(phase, status.step, status.plan, status.uses_atoll, exit, status.trained, standing)


def exit_to_wire(key: WorkerKey, exit: ExitRecord) -> common_pb2.WorkerStatus:
    """A recorded end, for those who ask when its agent has forgotten it."""
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
    del told["began_step"]  # that steps are counted from: nobody asks for it
    return jobs_pb2.Recovery(**told)


def event_to_wire(event: EventRecord) -> common_pb2.Event:
    return common_pb2.Event(
        sequence=event.sequence,
        unix_s=event.unix_s,
        level=_LEVELS[event.level],
        job=event.job,
        run=event.run,
        kind=event.kind,
        text=event.text,
    )


def level_from_wire(level: int) -> Level:
    return _LEVEL_OF.get(level, Level.INFO)


def launch_of_all(
    job: JobRecord,
    run: RunRecord,
    first: PlanRecord,
    placement: PlacementRecord | None,
    *,
    outside: Sequence[NodeRecord] = (),
    reveal: bool,
) -> bytes:
    """What the launches of a run have in common, serialised: with a thousand ranks it has as many members, keys and
    shares, so it is made once. outside: nodes with shards of the job and no part in the run. reveal: with the values of
    the job's secrets."""
    common = agents_pb2.Launch(
        world_size=len(run.members),
        master_address=run.master_address,
        master_port=run.master_port,
        spec=job_spec.to_wire(job.spec, reveal=reveal),
        plan=plan_to_wire(first),
    )
    if run.data_seed:
        common.members.extend(_members(run, placement))
        common.keys.public.extend(public_keys(run.data_seed, run.job, run.run, len(run.members)))
        common.keys.volunteers = secret_of_volunteers(job, run)
        common.outside.extend(
            agents_pb2.ShardHolder(
                node=one.name, address=one.address, port=one.shards_port, public_key=bytes.fromhex(one.shards_key)
            )
            for one in outside
        )
    return agents_pb2.ControllerMessage(launch=common).SerializeToString()


def launch(common: bytes, run: RunRecord, ranks: Sequence[int]) -> bytes:
    """The launch of a node's ranks, serialised: what all of the run have in common, then their own, which a parser
    merges into one message (protobuf's encoding, "Last One Wins")."""
    first, *others = (run.members[rank] for rank in ranks)
    own = agents_pb2.Launch(
        id=WorkerKey(run.job, run.run, first.rank).to_wire(),
        local_rank=first.local_rank,
        local_world_size=first.local_world_size,
        device=first.device,
        node_rank=first.node_rank,
        others=[
            agents_pb2.LaunchedBeside(
                rank=m.rank, local_rank=m.local_rank, device=m.device, secret=_secret(run, m.rank)
            )
            for m in others
        ],
    )
    if run.data_seed:
        own.keys.secret = _secret(run, first.rank)
    return common + agents_pb2.ControllerMessage(launch=own).SerializeToString()


def secret_of_volunteers(job: JobRecord, run: RunRecord) -> bytes:
    """With which its ranks recognise tickets; empty where the strategy takes no help."""
    return volunteers_secret(run.data_seed, run.job, run.run) if registry.find(job.spec.strategy).volunteer else b""


def launch_of_helper(job: JobRecord, run: RunRecord, action: LaunchHelper, number: int) -> agents_pb2.ControllerMessage:
    """A volunteer's: as of a run of its own, without the job's secrets, keys of its ranks, and any state of it."""
    spec = job_spec.to_wire(job.spec, reveal=False)
    spec.checkpoint.memory_replicas = 0
    name = f"{action.node}/{action.device}"
    launch = agents_pb2.Launch(
        id=WorkerKey(run.job, run.run, number).to_wire(),
        world_size=1,
        local_world_size=1,
        device=action.device,
        master_address="127.0.0.1",
        master_port=run.master_port,  # nobody meets there
        spec=spec,
        plan=common_pb2.Plan(id=1, run=run.run, shares=[1.0], planner="even", reason="a volunteer has no share"),
        helping=agents_pb2.Helping(
            name=name,
            ticket=ticket(secret_of_volunteers(job, run), name),
            address=action.helps.address,
            port=action.helps.port,
            public_key=public_key(run.data_seed, run.job, run.run, action.helps.rank),
        ),
    )
    return agents_pb2.ControllerMessage(launch=launch)


def _secret(run: RunRecord, rank: int) -> bytes:
    """Empty where workers send each other nothing but collectives."""
    return private_key(run.data_seed, run.job, run.run, rank) if run.data_seed else b""


def serve_shards(run: RunRecord) -> bytes:
    """Serialised, as it goes to all who hold shards of the job and have no part in the run."""
    keys = public_keys(run.data_seed, run.job, run.run, len(run.members))
    asked = agents_pb2.ServeShards(job=run.job, run=run.run, public=keys)
    return agents_pb2.ControllerMessage(serve_shards=asked).SerializeToString()


def plan_for_job(job: str, plan: PlanRecord) -> bytes:
    """Serialised, as it goes to many."""
    return agents_pb2.ControllerMessage(
        plan=agents_pb2.PlanForJob(job=job, plan=plan_to_wire(plan))
    ).SerializeToString()


def _members(run: RunRecord, placement: PlacementRecord | None) -> list[agents_pb2.Member]:
    kept_by = holders(placement.output) if placement else ((),) * len(run.members)
    return [
        agents_pb2.Member(
            rank=m.rank, node=m.node, island=m.island, holders=kept_by[m.node_rank], behind_nat=m.behind_nat
        )
        for m in run.members
    ]


def stop(action: StopRun) -> agents_pb2.ControllerMessage:
    return agents_pb2.ControllerMessage(
        stop=agents_pb2.StopWorkers(
            job=action.job, run=action.run, grace_s=action.grace_s, reason=action.reason, ranks=action.ranks
        )
    )


def drop_memory(action: DropMemory) -> agents_pb2.ControllerMessage:
    return agents_pb2.ControllerMessage(drop_memory=agents_pb2.DropMemory(job=action.job))


def forget(action: ForgetWorker) -> agents_pb2.ControllerMessage:
    return agents_pb2.ControllerMessage(forget=agents_pb2.Forget(id=action.key.to_wire()))
