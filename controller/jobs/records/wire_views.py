"""Views as messages, and the words of workers about them. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atoll.controller.jobs.agents.data_keys import private_key, public_keys
from atoll.controller.jobs.agents.replica_placement import holders
from atoll.controller.jobs.membership.members import by_position, members_of
from atoll.controller.jobs.membership.observed_views import ViewStage, WayIn, WorkerStanding
from atoll.controller.jobs.records.wire import plan_to_wire, secret_of_volunteers
from atoll.controller.state.records import JobRecord, PlacementRecord, PlanRecord, RunMember, RunRecord
from atoll.controller.state.views import ViewRecord, ViewState
from atoll.jobs import job_spec
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_REASON
from atoll.v1 import agents_pb2, common_pb2

MEET_S: Final = 10.0
_STAGES: Final = {common_pb2.ViewStage.Value(f"VIEW_STAGE_{stage.name}"): stage for stage in ViewStage}
_NO_WAY: Final = WayIn()


def standing_from_wire(status: common_pb2.WorkerStatus) -> WorkerStanding | None:
    """None of a worker that says nothing of views, or nothing that this version knows."""
    word = status.view
    if (stage := _STAGES.get(word.stage)) is None:
        return None
    way = _NO_WAY
    if word.HasField("times"):
        times = word.times
        way = WayIn(times.aborted_s, times.told_s, times.met_s, times.agreed_s, times.first_step_s)
    lost = tuple(word.lost[:64]) if word.lost else ()
    reason = word.reason[:MAX_REASON]
    return WorkerStanding(
        word.view, stage, word.step, reason, lost, way, word.takes_in, word.tolerates_loss_mid_step, word.handed_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunViews:
    """A run with what a message about its newest view is made of: its views and plans, oldest first, its placement."""

    run: RunRecord
    views: Sequence[ViewRecord]
    plans: Sequence[PlanRecord]
    placement: PlacementRecord | None


def newest_view(known: RunViews) -> bytes:
    """Serialised, as it goes to many."""
    message = view_to_wire(known)
    return agents_pb2.ControllerMessage(view=message).SerializeToString()


def view_to_wire(known: RunViews) -> agents_pb2.View:
    """The newest of the views, with the newest that is in force."""
    run, views, plans, placement = known.run, known.views, known.plans, known.placement
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
    # Its first plan; where that is so old that it is not kept any more, the newest there is.
    plan = next((plan for plan in plans if plan.id == view.plan), plans[-1])
    return agents_pb2.View(
        job=run.job,
        run=run.run,
        view=view.view,
        members=members,
        master_address=view.master_address,
        master_port=view.master_port,
        plan=plan_to_wire(plan),
        at_boundary=view.at_boundary,
        keeps_unsent=view.keeps_unsent,
        meet_s=MEET_S,
        in_force=in_force,
        reason=view.reason,
    )


def launch_to_join(job: JobRecord, known: RunViews, rank: int, *, reveal: bool) -> agents_pb2.ControllerMessage:
    """The launch of a worker that is in no view yet. reveal: with the values of the job's secrets."""
    run, view = known.run, view_to_wire(known)
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
        spec=job_spec.to_wire(job.spec, reveal=reveal),
        plan=view.plan,
        joins=view,
    )
    if run.data_seed:
        launch.members.extend([*(one.member for one in view.members), _member(member, ())])
        launch.keys.public.extend([*(one.public_key for one in view.members), _own_public(run, rank)])
        launch.keys.secret = private_key(run.data_seed, run.job, run.run, rank)
        launch.keys.volunteers = secret_of_volunteers(job, run)
    return agents_pb2.ControllerMessage(launch=launch)


def _own_public(run: RunRecord, rank: int) -> bytes:
    return public_keys(run.data_seed, run.job, run.run, len(run.members))[rank]


def _member(member: RunMember, kept_by: Sequence[int]) -> agents_pb2.Member:
    return agents_pb2.Member(
        rank=member.rank, node=member.node, island=member.island, holders=kept_by, behind_nat=member.behind_nat
    )
