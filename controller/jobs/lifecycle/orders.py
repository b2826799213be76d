"""Orders to nodes, given for as long as what is observed of a run is not what is wanted. Pure.

Nothing remembers what was sent: an order that was lost is given again on the next pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atoll.controller.jobs.lifecycle.observed import (
    Action,
    ForgetWorker,
    LaunchWorkers,
    ObservedJob,
    SendPlan,
    SendView,
    StopRun,
    WorkerPhase,
)
from atoll.controller.jobs.membership.members import members_of
from atoll.controller.jobs.membership.observed_views import ViewStage
from atoll.controller.state.records import JobPhase, RunMember, RunRecord
from atoll.controller.state.views import ViewCause
from atoll.jobs.worker_key import WorkerKey


def launches(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    missing: dict[str, list[int]] = {}
    for member in run.members:
        if not member.exit and member.rank not in observed.workers and _connected(observed, member.node):
            missing.setdefault(member.node, []).append(member.rank)
    for node, ranks in missing.items():
        yield LaunchWorkers(node, run.job, run.run, tuple(ranks))


def plans(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    """Plans after the first, which came with the launch: all that a node's present stream has not carried, in order.

    An agent hands plans to workers that it has started; what came while it still fetches their code would be lost."""
    newest, workers, view = observed.plans.newest, observed.workers, observed.views.newest
    if newest is None or (view is not None and view.view != newest.view):
        return
    first = view.plan if view is not None else 1  # it came with the view
    members = members_of(run, view)
    carried = {node: max(observed.plans.sent.get(node, 1), first) for node in {m.node for m in members}}
    behind = {node for node, sent in carried.items() if sent < newest.id}
    living = [m for m in members if m.node in behind and not m.exit] if behind else []
    fetching = {m.node for m in living if m.rank not in workers or workers[m.rank].phase is WorkerPhase.STARTING}
    for node in _nodes(observed, (m for m in living if m.node not in fetching)):
        sent = carried[node]
        yield from (SendPlan(node, run.job, run.run, plan.id) for plan in observed.plans.issued if plan.id > sent)


def views(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    """The newest view, where it is not the launch's own, to nodes whose present stream has not carried it, or whose
    workers do not follow it. That it is in force is said to all once more."""
    newest, in_force = observed.views.newest, observed.views.in_force
    if newest is None or newest.cause is ViewCause.LAUNCH:
        return
    wanted = (newest.view, in_force.view if in_force is not None else 0)
    living = [member for member in run.members if member.exit is None]
    behind = {
        member.node
        for member in living
        if (worker := observed.workers.get(member.rank)) is not None
        and worker.standing is not None
        and worker.standing.view < newest.view
        and worker.standing.stage not in (ViewStage.JOINING, ViewStage.READY)
    }
    for node in _nodes(observed, living):
        if observed.views.sent.get(node, (0, 0)) < wanted or node in behind:
            yield SendView(node, run.job, run.run, *wanted)


def stops(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    for node in _nodes(observed, (m for m in run.members if not m.exit)):
        yield StopRun(node, run.job, run.run, run.grace_s, run.why)


def forgets(observed: ObservedJob) -> Iterator[Action]:
    """Ends that are in etcd need not be reported any more: of `observed.run`, not of what this pass will write."""
    for member in observed.run.members if observed.run else ():
        if not member.exit or (worker := observed.workers.get(member.rank)) is None:
            continue
        alone = (member.rank,) if observed.job.status.phase is JobPhase.RUNNING else ()
        key = WorkerKey(observed.job.id, observed.run.run if observed.run else 0, member.rank)
        if worker.phase is WorkerPhase.EXITED:
            yield ForgetWorker(member.node, key)
        else:  # it counted as lost and is there again: an older run by now
            yield StopRun(member.node, key.job, key.run, 0.0, "it counted as lost", alone)


def _nodes(observed: ObservedJob, members: Iterable[RunMember]) -> Iterator[str]:
    yield from sorted({m.node for m in members if _connected(observed, m.node)})


def _connected(observed: ObservedJob, name: str) -> bool:
    node = observed.nodes.get(name)
    return node is not None and node.connected
