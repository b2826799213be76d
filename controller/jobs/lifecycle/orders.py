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
    StopRun,
    WorkerPhase,
)
from atoll.controller.state.records import RunMember, RunRecord
from atoll.worker_key import WorkerKey


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
    newest, workers = observed.plans.newest, observed.workers
    if newest is None:
        return
    behind = {node for node in {m.node for m in run.members} if observed.plans.sent.get(node, 1) < newest.id}
    living = [m for m in run.members if m.node in behind and not m.exit] if behind else []
    fetching = {m.node for m in living if m.rank not in workers or workers[m.rank].phase is WorkerPhase.STARTING}
    for node in _nodes(observed, (m for m in living if m.node not in fetching)):
        sent = observed.plans.sent.get(node, 1)
        yield from (SendPlan(node, run.job, run.run, plan.id) for plan in observed.plans.issued if plan.id > sent)


def stops(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    for node in _nodes(observed, (m for m in run.members if not m.exit)):
        yield StopRun(node, run.job, run.run, run.grace_s, run.why)


def forgets(observed: ObservedJob) -> Iterator[Action]:
    """Ends that are in etcd need not be reported any more: of `observed.run`, not of what this pass will write."""
    for member in observed.run.members if observed.run else ():
        if not member.exit or (worker := observed.workers.get(member.rank)) is None:
            continue
        key = WorkerKey(observed.job.id, observed.run.run if observed.run else 0, member.rank)
        if worker.phase is WorkerPhase.EXITED:
            yield ForgetWorker(member.node, key)
        else:  # it counted as lost and is there again: an older run by now
            yield StopRun(member.node, key.job, key.run, 0.0, "it counted as lost")


def _nodes(observed: ObservedJob, members: Iterable[RunMember]) -> Iterator[str]:
    yield from sorted({m.node for m in members if _connected(observed, m.node)})


def _connected(observed: ObservedJob, name: str) -> bool:
    node = observed.nodes.get(name)
    return node is not None and node.connected
