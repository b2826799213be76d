"""Orders to nodes, repeated while a run's observed state differs from the wanted one. Pure.

No sent order is remembered: one that was lost is repeated in the next pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.observed import (
    Action,
    ForgetWorker,
    LaunchWorkers,
    ObservedJob,
    SendPlan,
    SendView,
    StopRun,
    ViewStage,
    WorkerPhase,
)
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
    """Send a node the plans that its present stream has not carried, in order. The first came with the launch.

    An agent passes plans to workers that it has started; a plan that comes while it still fetches code is lost."""
    newest, workers, view = observed.plans.newest, observed.workers, observed.views.newest
    if newest is None or (view is not None and view.view != newest.view):
        return
    first = view.plan if view is not None else 1  # its first plan came with the view
    members = members_of(run, view)
    carried = {node: max(observed.plans.sent.get(node, 1), first) for node in {m.node for m in members}}
    behind = {node for node, sent in carried.items() if sent < newest.id}
    living = [m for m in members if m.node in behind and not m.exit] if behind else []
    fetching = {m.node for m in living if m.rank not in workers or workers[m.rank].phase is WorkerPhase.STARTING}
    for node in _nodes(observed, (m for m in living if m.node not in fetching)):
        sent = carried[node]
        yield from (SendPlan(node, run.job, run.run, plan.id) for plan in observed.plans.issued if plan.id > sent)


def views(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    """Send the newest view, unless it is the launch's own, to nodes whose present stream has not carried it, or whose
    workers do not follow it. Send it to all once more when it comes into force."""
    newest, in_force = observed.views.newest, observed.views.in_force
    if newest is None or newest.cause is ViewCause.LAUNCH:
        return
    wanted = (newest.view, in_force.view if in_force is not None else 0)
    living = [member for member in run.members if member.exit is None]
    behind = {
        member.node
        for member in living
        if (worker := observed.workers.get(member.rank)) is not None
        and worker.view_report is not None
        and worker.view_report.view < newest.view
        and worker.view_report.stage not in (ViewStage.JOINING, ViewStage.READY)
    }
    for node in _nodes(observed, living):
        if observed.views.sent.get(node, (0, 0)) < wanted or node in behind:
            yield SendView(node, run.job, run.run, *wanted)


def stops(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    for node in _nodes(observed, (m for m in run.members if not m.exit)):
        yield StopRun(node, run.job, run.run, run.grace_s, run.why)


def forgets(observed: ObservedJob) -> Iterator[Action]:
    """Let agents forget ends that are in etcd: those of `observed.run`, not those that this pass will write."""
    for member in observed.run.members if observed.run else ():
        if not member.exit or (worker := observed.workers.get(member.rank)) is None:
            continue
        alone = (member.rank,) if observed.job.status.phase is JobPhase.RUNNING else ()
        key = WorkerKey(observed.job.id, observed.run.run if observed.run else 0, member.rank)
        if worker.phase is WorkerPhase.EXITED:
            yield ForgetWorker(member.node, key)
        else:  # it counted as lost and is there again
            yield StopRun(member.node, key.job, key.run, 0.0, "it counted as lost", alone)


def _nodes(observed: ObservedJob, members: Iterable[RunMember]) -> Iterator[str]:
    yield from sorted({m.node for m in members if _connected(observed, m.node)})


def _connected(observed: ObservedJob, name: str) -> bool:
    node = observed.nodes.get(name)
    return node is not None and node.connected
