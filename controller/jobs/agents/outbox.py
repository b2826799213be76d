"""Outbox of a leader: carries out the actions of a pass as messages to agents.

A message that goes to many nodes is made once. Nothing is decided here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, TypeVar

from atoll.controller.jobs.agents.sessions import AgentSessions
from atoll.controller.jobs.model.data_keys import private_key, public_key, public_keys, volunteers_secret
from atoll.controller.jobs.model.members import by_position, members_of
from atoll.controller.jobs.model.observed import (
    Action,
    DropMemory,
    ForgetWorker,
    LaunchWorkers,
    SendPlan,
    SendView,
    StopRun,
)
from atoll.controller.jobs.model.replica_placement import holders
from atoll.controller.jobs.model.strategy_in_force import strategy_of
from atoll.controller.jobs.model.supply import LaunchHelper
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.jobs.records.wire import plan_to_wire, shared_fields
from atoll.controller.state.records import JobRecord, NodeRecord, PlacementRecord, PlanRecord, RunMember, RunRecord
from atoll.controller.state.views import ViewState
from atoll.jobs import job_spec
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_HOLDERS
from atoll.security.volunteer_ticket import ticket
from atoll.strategies import registry
from atoll.strategies.declaration import as_json
from atoll.v1 import agents_pb2, common_pb2

logger = logging.getLogger(__name__)

MEETING_S: Final = 10.0
"""Time that the members of a new view get to connect, in seconds."""
Message = TypeVar("Message")


class AgentOutbox:
    """Messages of one leader epoch."""

    def __init__(self, sessions: AgentSessions, *, reveal: bool) -> None:
        """reveal: launches carry the values of the jobs' secrets."""
        self._sessions = sessions
        self._reveal = reveal
        self._newest: dict[str, tuple[Hashable, Any]] = {}
        """Newest message of each kind that many nodes get, and the record that it was made from."""

    def act(self, state: JobState | None, action: Action, now_s: float) -> None:
        """Send an action's message, unless its node is away or got it just now. state: of its job, if it has one."""
        session = self._sessions.connected.get(action.node)
        if session is None:
            return
        match action:
            case StopRun():
                session.send_unless_recent(replace(action, reason=""), lambda: stop(action), now_s)
            case ForgetWorker():
                session.send_unless_recent(action, lambda: forget(action), now_s)
            case DropMemory():
                session.send_unless_recent(action, lambda: drop_memory(action), now_s)
            case LaunchWorkers(joins=True) if state and state.run and state.plans and state.views:
                known, [rank] = state, action.ranks
                session.send_unless_recent(action, lambda: launch_to_join(known, rank, reveal=self._reveal), now_s)
            case LaunchWorkers() if state and state.run and state.plans:
                run, (common, serving) = state.run, self._common_launch(state, state.run)
                for node in serving:
                    if other := self._sessions.connected.get(node):
                        topic = ("serve shards", run.job, run.run)
                        other.send_unless_recent(topic, lambda: serve_shards(run), now_s)
                session.send_unless_recent(action, lambda: launch(common, run, action.ranks), now_s)
            case SendPlan() if state:
                session.plans_sent[action.job, action.run] = action.plan
                plan = next(plan for plan in state.plans if plan.id == action.plan)
                key = (action.job, action.run, plan.id)
                message = self._made_once("plan", key, lambda: plan_for_job(action.job, plan))
                session.send(message)
            case SendView() if state and state.run and state.plans:
                session.views_sent[action.job, action.run] = (action.view, action.in_force)
                known, view = state, (action.job, action.run, action.view, action.in_force)
                message = self._made_once("view", view, lambda: newest_view(known))
                session.send_unless_recent(action, lambda: message, now_s)
            case _:
                logger.error("job %s has no plan to launch %s with", state and state.job.id, action)

    def _common_launch(self, state: JobState, run: RunRecord) -> tuple[bytes, list[str]]:
        """Return what all launches of the run carry, serialised, and the nodes outside of it that serve its shards."""

        def make() -> tuple[bytes, list[str]]:
            outside, first = self._outside(run), state.plans[0]
            view = state.views[0] if state.views else None
            strategy = strategy_of(state.job, view)
            common = launch_of_all(
                state.job, run, first, state.placement, strategy=strategy, outside=outside, reveal=self._reveal
            )
            return common, [node.name for node in outside]

        return self._made_once("launch", (run.job, run.run), make)

    def _made_once(self, kind: str, key: Hashable, make: Callable[[], Message]) -> Message:
        if kind not in self._newest or self._newest[kind][0] != key:
            self._newest[kind] = (key, make())
        message: Message = self._newest[kind][1]
        return message

    def _outside(self, run: RunRecord) -> list[NodeRecord]:
        """Return the nodes that have shards of the job in memory, serve them, and take no part in the run."""
        nodes = {member.node for member in run.members}
        there = (
            session.record
            for name, session in sorted(self._sessions.connected.items())
            if run.data_seed and run.job in session.memory_jobs and name not in nodes and session.record.shards_port
        )
        return list(islice(there, MAX_HOLDERS))


def launch_of_all(
    job: JobRecord,
    run: RunRecord,
    first: PlanRecord,
    placement: PlacementRecord | None,
    *,
    strategy: str,
    outside: Sequence[NodeRecord] = (),
    reveal: bool,
) -> bytes:
    """Serialise what all launches of a run have in common: with a thousand ranks as many members, keys and shares.

    strategy: by which the run begins. outside: nodes with shards of the job and no part in the run. reveal: with the
    values of the job's secrets."""
    common = agents_pb2.Launch(
        world_size=len(run.members),
        master_address=run.master_address,
        master_port=run.master_port,
        spec=_spec(job, strategy, reveal=reveal),
        strategy_is_automatic=_is_automatic(job, strategy),
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
    """Serialise the launch of a node's ranks: the run's common part, then their own.

    A parser merges the two into one message (protobuf's encoding, "Last One Wins")."""
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


def launch_to_join(state: JobState, rank: int, *, reveal: bool) -> agents_pb2.ControllerMessage:
    """Make the launch of a worker that is in no view yet. reveal: with the values of the job's secrets."""
    run, view = _run_of(state), view_to_wire(state)
    member = run.members[rank]
    launch = agents_pb2.Launch(
        id=WorkerKey(run.job, run.run, rank).to_wire(),
        world_size=len(view.members) + 1,
        local_rank=member.local_rank,
        local_world_size=member.local_world_size,
        node_rank=min(member.node_rank, len(view.members)),
        device=member.device,
        master_address=view.master_address,
        master_port=view.master_port,
        spec=_spec(state.job, view.strategy, reveal=reveal),
        strategy_is_automatic=_is_automatic(state.job, view.strategy),
        plan=view.plan,
        joins=view,
    )
    if run.data_seed:
        own = public_keys(run.data_seed, run.job, run.run, len(run.members))[rank]
        launch.members.extend([*(one.member for one in view.members), _member(member)])
        launch.keys.public.extend([*(one.public_key for one in view.members), own])
        launch.keys.secret = _secret(run, rank)
        launch.keys.volunteers = secret_of_volunteers(state.job, run)
    return agents_pb2.ControllerMessage(launch=launch)


def launch_of_helper(job: JobRecord, run: RunRecord, action: LaunchHelper, number: int) -> agents_pb2.ControllerMessage:
    """Make a volunteer's launch: a run of its own, without the job's secrets, its ranks' keys and its state."""
    spec = _spec(job, job.own_strategy, reveal=False)
    spec.checkpoint.memory_replicas = 0
    name = f"{action.node}/{action.device}"
    launch = agents_pb2.Launch(
        id=WorkerKey(run.job, run.run, number).to_wire(),
        world_size=1,
        local_world_size=1,
        device=action.device,
        master_address="127.0.0.1",
        master_port=run.master_port,  # not used
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


def _spec(job: JobRecord, strategy: str, *, reveal: bool) -> common_pb2.JobSpec:
    """Make the spec of a launch by this strategy."""
    spec = job_spec.to_wire(job.spec, reveal=reveal)
    spec.strategy, spec.strategy_settings = strategy, as_json(job.settings_of(strategy))
    return spec


def _is_automatic(job: JobRecord, strategy: str) -> bool:
    return job.leaves_strategy and job.pinned.strategy != strategy


def secret_of_volunteers(job: JobRecord, run: RunRecord) -> bytes:
    """Return the secret by which ranks recognise tickets; empty if the strategy takes no help."""
    return volunteers_secret(run.data_seed, run.job, run.run) if registry.find(job.own_strategy).volunteer else b""


def serve_shards(run: RunRecord) -> bytes:
    """Serialise the order to serve shards, for the nodes that hold some and have no part in the run."""
    keys = public_keys(run.data_seed, run.job, run.run, len(run.members))
    asked = agents_pb2.ServeShards(job=run.job, run=run.run, public=keys)
    return agents_pb2.ControllerMessage(serve_shards=asked).SerializeToString()


def plan_for_job(job: str, plan: PlanRecord) -> bytes:
    """Serialise a plan, for many nodes."""
    return agents_pb2.ControllerMessage(
        plan=agents_pb2.PlanForJob(job=job, plan=plan_to_wire(plan))
    ).SerializeToString()


def newest_view(state: JobState) -> bytes:
    """Serialise the newest view, for many nodes."""
    return agents_pb2.ControllerMessage(view=view_to_wire(state)).SerializeToString()


def view_to_wire(state: JobState) -> agents_pb2.View:
    """Make the message of the newest view, with the number of the newest one in force."""
    run, views, plans, placement = _run_of(state), state.views, state.plans, state.placement
    view, positions = views[-1], by_position(run, views[-1]).members
    kept_by = holders(placement.output) if placement is not None and placement.view == view.view else ()
    public = public_keys(run.data_seed, run.job, run.run, len(run.members)) if run.data_seed else ()
    in_force = next((v.view for v in reversed(views) if v.state is ViewState.IN_FORCE), 0)
    states = set(view.has_state)
    members = [
        agents_pb2.ViewMember(
            member=_member(member, kept_by[position.node_rank] if kept_by else ()),
            has_state=member.rank in states,
            public_key=public[member.rank] if public else b"",
        )
        for member, position in zip(members_of(run, view), positions, strict=True)
    ]
    # The view's first plan, or the newest if that one is so old that it is not kept.
    plan = next((plan for plan in plans if plan.id == view.plan), plans[-1])
    strategy = strategy_of(state.job, view)
    return agents_pb2.View(
        **{
            **shared_fields(agents_pb2.View, view),
            "members": members,
            "plan": plan_to_wire(plan),
            "meet_s": MEETING_S,
            "in_force": in_force,
            "strategy": strategy,
            "strategy_settings": as_json(state.job.settings_of(strategy)),
        }
    )


def _run_of(state: JobState) -> RunRecord:
    assert state.run is not None  # a view and a plan belong to a run
    return state.run


def _members(run: RunRecord, placement: PlacementRecord | None) -> list[agents_pb2.Member]:
    kept_by = holders(placement.output) if placement else ((),) * len(run.members)
    return [_member(member, kept_by[member.node_rank]) for member in run.members]


def _member(member: RunMember, kept_by: Sequence[int] = ()) -> agents_pb2.Member:
    return agents_pb2.Member(
        rank=member.rank, node=member.node, island=member.island, holders=kept_by, behind_nat=member.behind_nat
    )


def _secret(run: RunRecord, rank: int) -> bytes:
    """Return the rank's private data key; empty if workers exchange nothing but collectives."""
    return private_key(run.data_seed, run.job, run.run, rank) if run.data_seed else b""


def stop(action: StopRun) -> agents_pb2.ControllerMessage:
    return agents_pb2.ControllerMessage(stop=agents_pb2.StopWorkers(**shared_fields(agents_pb2.StopWorkers, action)))


def drop_memory(action: DropMemory) -> agents_pb2.ControllerMessage:
    return agents_pb2.ControllerMessage(drop_memory=agents_pb2.DropMemory(job=action.job))


def forget(action: ForgetWorker) -> agents_pb2.ControllerMessage:
    return agents_pb2.ControllerMessage(forget=agents_pb2.Forget(id=action.key.to_wire()))
